"""
Which sentences taught the model this answer?
=============================================

A small transformer learns facts from sentences that rules generate: which object a subject has for
a relation. For each answer it is therefore known which training sentences state it. Influence
functions should find these among all others, of which many have the same subject or relation. With
EK-FAC that takes no linear solve; the gradients of the sentences are kept in a folder, so that
further questions need no pass over them.
"""

import os
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib.pyplot as plt
import numpy as np
from scipy.sparse.linalg import aslinearoperator

import hvp

# %%
# Sentences
# ---------
#
# 16 subjects with 4 relations each have one of 20 objects. Each of these 64 facts is stated by four
# sentences, which differ in two filler words and in the order of subject and relation.

SUBJECTS, RELATIONS, OBJECTS, FILLERS, STATED = 16, 4, 20, 12, 4
random = np.random.default_rng(0)
objects = random.integers(0, OBJECTS, (SUBJECTS, RELATIONS))


def sentence(subject, relation):
    """Return a sentence of five tokens, of which the last asks for the object."""
    fillers = SUBJECTS + RELATIONS + random.integers(0, FILLERS, 2)
    words = [subject, SUBJECTS + relation]
    if random.random() < 0.5:
        words.reverse()
    return [fillers[0], words[0], fillers[1], words[1], SUBJECTS + RELATIONS + FILLERS]


facts = [(s, r) for s in range(SUBJECTS) for r in range(RELATIONS)]
stated = [fact for fact in facts for _ in range(STATED)]
stated = [stated[i] for i in random.permutation(len(stated))]
x = np.array([sentence(*fact) for fact in stated], "int32")
y = np.array([objects[fact] for fact in stated], "int32")
asked = [facts[i] for i in random.permutation(len(facts))[:32]]
questions = np.array([sentence(*fact) for fact in asked], "int32")
answers = np.array([objects[fact] for fact in asked], "int32")

# %%
# A transformer
# -------------

keras.utils.set_random_seed(0)
layers = keras.layers


class Positions(layers.Layer):
    """Adds a vector for each position."""

    def build(self, shape):
        """Make the vectors."""
        self.table = self.add_weight(shape=(1, *shape[1:]), initializer="normal", name="table")

    def call(self, x):
        """Add them."""
        return x + self.table


tokens = keras.Input((5,), dtype="int32")
h = Positions()(layers.Embedding(SUBJECTS + RELATIONS + FILLERS + 1, 24)(tokens))
for _ in range(2):
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 12)(h, h))
    h = layers.LayerNormalization()(h + layers.Dense(24)(layers.Dense(48, "gelu")(h)))
model = keras.Model(tokens, layers.Dense(OBJECTS)(h[:, -1]))
model.compile(
    keras.optimizers.AdamW(3e-3, weight_decay=0.05),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
model.fit(x, y, epochs=150, batch_size=64, verbose=0)
right = np.argmax(model(questions), axis=1) == answers
print(f"{model.count_params()} weights, {np.mean(right):.0%} of {len(asked)} questions answered")

# %%
# What K-FAC makes of it
# ----------------------
#
# Layers are found in the graph. The kernels of attention and dense layers have Kronecker factors,
# normalization and positions have exact blocks.

K = hvp.EKFAC.from_keras(model, (x, y))
print(K)
for block in K.blocks[:4]:
    print(f"  {block.kind:10} {block.shape}  {', '.join(block.names)}")

# %%
# Scores
# ------
#
# The damping is a tenth of the mean eigenvalue of EK-FAC, a common choice.

damping = 0.1 * K.trace / K.shape[0]
asked_data = questions[right], answers[right]
with tempfile.TemporaryDirectory() as folder:
    influence = hvp.InfluenceFunctions.from_keras(
        model, (x, y), curvature=K, damping=damping, gradients=os.path.join(folder, "gradients")
    )
    times = []
    for _ in range(2):
        start = time.perf_counter()
        scores = {"EK-FAC": influence.scores(asked_data)}
        times.append(time.perf_counter() - start)
    first_question = tuple(array[:1] for array in asked_data)
    top = influence.top(first_question, k=4)
    by_token = influence.scores_by_token(first_question, examples=top.helpful[0])
print(f"scores took {times[0]:.2f} s, with the gradients kept {times[1]:.3f} s")
plain = hvp.InfluenceFunctions.from_keras(
    model,
    (x, y),
    curvature="gauss-newton",
    solver=lambda A: aslinearoperator(np.eye(A.shape[0], dtype=A.dtype)),
)
scores["gradients alone"] = plain.scores(asked_data)

# %%
# Which words matter?
# -------------------
#
# The score of a sentence is divided among its tokens. In the four sentences that are most helpful
# for the first question, the subject, the relation and the last token, where the object is read
# off, have nearly the whole score. The fillers have almost none of it.


def word(token):
    """Return a token as text."""
    if token < SUBJECTS:
        return f"subject {token}"
    if token < SUBJECTS + RELATIONS:
        return f"relation {token - SUBJECTS}"
    if token < SUBJECTS + RELATIONS + FILLERS:
        return f"filler {token - SUBJECTS - RELATIONS}"
    return "?"


parts = by_token.tokens[0]
limit = np.abs(parts).max()
fig, ax = plt.subplots(figsize=(6, 2.4), layout="constrained")
picture = ax.imshow(parts, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
for row, number in enumerate(top.helpful[0]):
    for column, token in enumerate(x[number]):
        color = "white" if abs(parts[row, column]) > limit / 2 else "black"
        ax.text(column, row, word(token), ha="center", va="center", color=color, fontsize=8)
question = ", ".join(word(token) for token in sorted(first_question[0][0])[:2])
ax.set(title=f"Asked: {question}", xticks=[], yticks=range(4), ylabel="rank")
ax.set_yticklabels(range(1, 5))
fig.colorbar(picture, label="part of the score")
plt.show()

# %%
# Do they find the sources?
# -------------------------
#
# The precision among the `k` most helpful sentences: which part of them state the fact that is
# asked for. There are four of these in 256; a random choice would find one in 64.

facts_asked = [fact for fact, is_right in zip(asked, right) if is_right]
is_source = np.array([[fact == other for other in stated] for fact in facts_asked])
same_subject = np.array([[fact[0] == other[0] for other in stated] for fact in facts_asked])
fig, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
ranks = np.arange(1, 13)
for name, values in scores.items():
    order = np.argsort(-values, axis=1)
    sources = np.take_along_axis(is_source, order, axis=1)
    found = np.array([sources[:, :k].mean() for k in ranks])
    subjects = np.take_along_axis(same_subject, order, axis=1)[:, :4].mean()
    print(f"{name}: precision at 4 {found[3]:.2f}; {subjects:.2f} of these have the same subject")
    ax.plot(ranks, found, "o-", label=name)
ax.plot(ranks, np.minimum(1, STATED / ranks), "k:", label="the best there could be")
ax.axhline(STATED / len(stated), color="0.7", lw=1)
ax.set(xlabel="most helpful sentences", ylabel="part that states the fact", ylim=(0, 1.05))
ax.legend(frameon=False)
plt.show()
