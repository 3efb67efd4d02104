"""Products under tapes: gradients in the vector are right, in the variables too, or an error."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp

W = np.array([1.0, 2.0, 3.0])


def operators():
    w = tf.Variable(W)

    def loss():
        return tf.reduce_sum(w**4)

    def of_data(x):
        return tf.reduce_mean(x) * loss()

    data = (np.ones(4),)
    H = hvp.HessianOperator(loss, w)
    J = hvp.JacobianOperator(lambda: w**3, w)
    kernel = tf.Variable(np.diag(W))
    K = hvp.KFAC(
        lambda x: x @ kernel,
        lambda p, y: tf.reduce_mean(tf.reduce_sum((p - y) ** 2, 1)) / 2,
        kernel,
        (np.ones((2, 3)), np.ones((2, 3))),
    ).block(kernel)
    return {
        "graph": (H.product, w, H),
        "nest": (lambda v: H.product(H.unflatten(v)), w, H),
        "tape": (hvp.HessianOperator(loss, w, engine="tape").product, w, None),
        "batches": (hvp.HessianOperator(of_data, w, data, batch_size=2).product, w, None),
        "block": (H.block([w]).product, w, H),
        "tf operator": (H.as_tf_operator().matvec, w, H),
        "jvp": (J.jvp, w, J),
        "vjp": (J.vjp, w, J),
        "factors": (lambda v: K.product(tf.reshape(v, [1, 3]) * tf.ones([3, 1], F)), kernel, K),
    }


F = tf.float64
KNOWN = ["graph", "nest", "tape", "jvp", "vjp"]
NAMES = [*KNOWN, "batches", "block", "tf operator", "factors"]


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.few(1)
def test_the_gradient_in_the_variables_is_a_third_derivative(name, in_graph):
    if name == "tape" and in_graph:
        pytest.skip("the tape engine runs Python in graphs")
    multiply, w, kept = operators()[name]
    v, u = tf.constant([1.0, -1.0, 2.0], F), tf.constant([0.5, 1.0, 3.0], F)

    def gradients():
        with tf.GradientTape() as tape:
            tape.watch(v)
            both = tf.tensordot(u, tf.nest.flatten(multiply(v))[0], 1) + tf.reduce_sum(w)
        return tape.gradient(both, [v, w])

    by_v, by_w = tf.function(gradients)() if in_graph else gradients()
    power = 3 if name in ("jvp", "vjp") else 12
    np.testing.assert_allclose(by_v, power * W**2 * u)
    np.testing.assert_allclose(by_w, 2 * power * W * u * v + 1)
    del kept


@pytest.mark.parametrize("is_nest", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"engine": "tape"}, {"jit_compile": True}, {"damping": 0.3}],
    ids=str,
)
@pytest.mark.few(2)
def test_tapes_around_tapes_know_vectors_that_depend_on_the_variables(options, is_nest):
    """The Hessian is `diag(w**2)`. Its products with powers of `w` are powers, to any order."""
    w = tf.Variable(W)
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, [w], **options)
    damping = options.get("damping", 0.0)

    def product(v):
        return H.product([v])[0] if is_nest else H.product(v)

    def derivative(function, order):
        if not order:
            return function()
        with tf.GradientTape() as tape:
            inner = derivative(function, order - 1)
        return tape.gradient(inner, w)

    for order, expected in enumerate([W**4, 4 * W**3, 12 * W**2, 24 * W, 24 + 0 * W]):
        of_damping = damping * [W**2, 2 * W, 2, 0, 0][order]
        once = derivative(lambda: product(w**2), order)
        np.testing.assert_allclose(once, expected + of_damping, rtol=1e-9, atol=1e-9)
        of_gradient = derivative(lambda: product(3 * H.gradient_tensors()[0]), order)
        third = damping * [W**3, 3 * W**2, 6 * W, 6 + 0 * W, 0 * W][order]
        fifth = [W**5, 5 * W**4, 20 * W**3, 60 * W**2, 120 * W][order]
        np.testing.assert_allclose(of_gradient, fifth + third, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", ["eager", "graph", "xla"])
def test_a_product_of_a_product_twice_differentiated(way):
    w = tf.Variable(W)
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)

    def derivatives():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                value = tf.reduce_sum(H.product(H.product(w**2)))
            slope = tape.gradient(value, w)
        return slope, outer.gradient(slope, w)

    if way != "eager":
        derivatives = tf.function(derivatives, jit_compile=way == "xla")
    slope, curvature = derivatives()
    np.testing.assert_allclose(slope, 6 * W**5)
    np.testing.assert_allclose(curvature, 30 * W**4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.few(3)
def test_forward_mode_and_gradients_of_gradients_know_the_variables(name):
    multiply, variable, kept = operators()[name]
    v = tf.constant([1.0, -1.0, 2.0], F)
    with tf.autodiff.ForwardAccumulator(v, tf.ones_like(v)) as accumulator:
        product = tf.nest.flatten(multiply(v))[0]
    expected = tf.nest.flatten(multiply(tf.ones_like(v)))[0]
    np.testing.assert_allclose(accumulator.jvp(product), expected)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            tape.watch(v)
            total = tf.reduce_sum(tf.nest.flatten(multiply(v))[0])
        value = tf.reduce_sum(tape.gradient(total, v) ** 2)
    if name in KNOWN:  # the gradient of `(12 w**2)**2`, or of `(3 w**2)**2`
        squared = 9 if name in ("jvp", "vjp") else 144
        np.testing.assert_allclose(outer.gradient(value, variable), 4 * squared * W**3)
    else:
        with pytest.raises(hvp.SecondDerivativeError):
            np.asarray(outer.gradient(value, variable))
    del kept


def network():
    rng = np.random.default_rng(0)
    a, b = (tf.Variable(rng.standard_normal(shape) / 2) for shape in [(3, 4), (4, 1)])
    x, y = rng.standard_normal((7, 3)), rng.standard_normal((7, 1))

    def loss(x, y):
        return tf.reduce_mean((tf.tanh(x @ a) @ b - y) ** 2)

    return loss, [a, b], (x, y)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"damping": 0.3},
        {"reduction": "sum", "regularization": lambda: 0.0},
        {"recompute": False, "jit_compile": True},
    ],
)
def test_a_penalty_of_curvature_has_the_gradient_of_differences(options):
    loss, variables, data = network()
    options = dict(options)
    if "regularization" in options:
        options["regularization"] = lambda: tf.reduce_sum(variables[0] ** 4)
    H = hvp.HessianOperator(loss, variables, data, **options)
    v = np.random.default_rng(1).standard_normal(H.shape[0])

    def penalty():
        return tf.reduce_sum(H.product(tf.constant(v)) ** 2)

    with tf.GradientTape() as tape:
        value = penalty()
    gradient = H.flatten(tape.gradient(value, variables)).numpy()
    direction = np.random.default_rng(2).standard_normal(H.shape[0])
    parts, h = H.unflatten(tf.constant(direction)), 1e-5
    ends = []
    for sign in (1, -2):
        for variable, part in zip(variables, parts):
            variable.assign_add(sign * h * part)
        H.refresh()
        ends.append(float(penalty()))
    assert gradient @ direction == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-6)


def test_third_derivatives_that_do_not_exist_are_an_error_when_they_are_used():
    w = tf.Variable(W)

    def loss():
        total = tf.constant(0.0, F)
        for i in tf.range(3):
            total += w[i] ** 4
        return total

    H = hvp.HessianOperator(tf.function(loss), w)
    v = tf.ones(3, F)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(v)
        product = H.product(v)
        both = tf.reduce_sum(product) + tf.reduce_sum(w)
    np.testing.assert_allclose(tape.gradient(product, v), 12 * W**2)
    for target in (product, both):
        with pytest.raises(hvp.SecondDerivativeError, match="While"):
            np.asarray(tape.gradient(target, w))


def test_reads_of_variables_in_a_loop_are_not_counted_twice():
    w = tf.Variable(W)

    def loss():
        return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x * w[0]), [0, w[1]])[1]

    H = hvp.HessianOperator(tf.function(loss), w, engine="tape")
    with tf.GradientTape() as tape:
        product = H.product(tf.constant([1.0, 0.0, 0.0], F))
    with pytest.raises(hvp.SecondDerivativeError):
        np.asarray(tape.gradient(product, w))


def test_a_third_derivative_after_a_change_is_an_error():
    w, frozen = tf.Variable(W), tf.Variable(2.0, dtype=F, trainable=False)
    H = hvp.HessianOperator(lambda: frozen * tf.reduce_sum(w**4), w)
    with tf.GradientTape() as tape:
        product = H.product(tf.ones(3, F))
    frozen.assign(3.0)
    with pytest.raises(hvp.StaleOperatorError):
        np.asarray(tape.gradient(product, w))


@pytest.mark.parametrize("name", NAMES[len(KNOWN) :])
@pytest.mark.few(1)
def test_the_gradient_in_the_variables_is_an_error_and_that_in_the_vector_is_right(name):
    multiply, w, kept = operators()[name]
    v, u = tf.constant([1.0, -1.0, 2.0], F), tf.constant([0.5, 1.0, 3.0], F)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(v)
        product = multiply(v)
        total = tf.reduce_sum(product)
        both = total + tf.reduce_sum(w)
    if name != "factors":
        np.testing.assert_allclose(tape.gradient(product, v, u), 12 * W**2 * u)
    for target in (total, both):
        with pytest.raises(hvp.SecondDerivativeError, match="third derivative"):
            np.asarray(tape.gradient(target, w))
    gradient = tape.gradient(total, [v, w])[1]
    with pytest.raises(hvp.SecondDerivativeError):
        w.assign_sub(gradient)
    # The remedy of the message.
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(tf.stop_gradient(multiply(v)) * tf.ones_like(product) + w)
    assert np.all(np.asarray(tape.gradient(value, w)) > 0)
    del kept


@pytest.mark.parametrize("jit_compile", [None, True])
def test_functions_that_multiply(jit_compile):
    w = tf.Variable(W)
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4), w)
    multiply = tf.function(lambda v: H.product(v), jit_compile=jit_compile)
    v = tf.Variable(np.ones(3))
    with tf.GradientTape() as tape, pytest.raises(hvp.SecondDerivativeError, match="open the tape"):
        tape.gradient(multiply(v.value()), w)

    @tf.function(jit_compile=jit_compile)
    def gradient(v):
        with tf.GradientTape() as tape:
            tape.watch(v)
            product = H.product(v)
        return tape.gradient(product, v)

    np.testing.assert_allclose(gradient(tf.ones(3, F)), 12 * W**2)


V = np.array([1.0, -1.0, 2.0])
# Gradients of a product or value, times `V`, in `w`, `k` and `z`.
HYPERPARAMETERS = {
    "product": (36 * W * V**2, 9 * np.sum(W**2 * V**2), 12 * np.sum(W**2 * V**2)),
    "gradient_tensors": (18 * W**2 * V, 3 * np.sum(W**3 * V), 4 * np.sum(W**3 * V)),
    "solve": (
        -(V**2) / W**3 / 9,
        -np.sum(V**2 / W**2) / 36,
        -np.sum(V**2 / W**2) / 27,
    ),
    "jvp": (108 * W * V**2, 27 * np.sum(W**2 * V**2), 36 * np.sum(W**2 * V**2)),
    "vjp": (108 * W * V**2, 27 * np.sum(W**2 * V**2), 36 * np.sum(W**2 * V**2)),
    "value": (54 * W**2 * V, 9 * np.sum(W**3 * V), 12 * np.sum(W**3 * V)),
}


@pytest.mark.parametrize("options", [{}, {"engine": "tape"}, {"jit_compile": True}], ids=str)
@pytest.mark.parametrize("made", ["before", "within", "between"])
@pytest.mark.parametrize("what", HYPERPARAMETERS)
@pytest.mark.few(3)
def test_all_variables_that_the_loss_reads_have_gradients(what, made, options):
    """The loss is `k z**2 sum(w**4) / 12`, and the function `k z**2 w**3`."""
    w, k = tf.Variable(W), tf.Variable(2.0, dtype=F)
    z = tf.Variable(3.0, dtype=F, trainable=False)

    def make():
        if what in ("jvp", "vjp", "value"):
            kind = hvp.linearize if made == "before" else hvp.JacobianOperator
            return kind(lambda: k * z**2 * w**3, w, **options)
        return hvp.HessianOperator(lambda: k * z**2 * tf.reduce_sum(w**4) / 12, w, **options)

    def total(operator):
        v = tf.constant(V)
        if what == "solve":
            return tf.reduce_sum(hvp.solve(operator, v, rtol=1e-12).x * v)
        if what in ("value", "gradient_tensors"):
            found = operator.value if what == "value" else operator.gradient_tensors()
        else:
            found = getattr(operator, what)(v)
        return tf.reduce_sum(found * v)

    operator = make() if made == "before" else None
    with tf.GradientTape() as outer:
        outer.watch(z)
        if made == "between":
            operator = make()
        with tf.GradientTape() as tape:
            tape.watch(z)
            value = total(operator or make())
        gradients = tape.gradient(value, [w, k, z])
    for gradient, expected in zip(gradients, HYPERPARAMETERS[what]):
        np.testing.assert_allclose(gradient, expected, rtol=1e-9)
    # The other tape knows that the gradients depend on the variables as well.
    by_k = outer.gradient(gradients[2], k)
    exponent = -1 if what == "solve" else 1
    np.testing.assert_allclose(by_k, exponent * HYPERPARAMETERS[what][2] / 2, rtol=1e-9)


def test_hyperparameters_in_graphs_and_in_forward_mode():
    w, k = tf.Variable(W), tf.Variable(2.0, dtype=F)
    H = hvp.HessianOperator(lambda: k**2 * tf.reduce_sum(w**4) / 12, w)

    @tf.function
    def gradients():
        with tf.GradientTape() as tape:
            product = H.product(tf.constant(V))
        return tape.gradient(product, [w, k], tf.constant(V))

    by_w, by_k = gradients()
    np.testing.assert_allclose(by_w, 8 * W * V**2)
    np.testing.assert_allclose(by_k, 4 * np.sum(W**2 * V**2))
    with tf.autodiff.ForwardAccumulator(k, tf.constant(1.0, F)) as accumulator:
        product = H.product(tf.constant(V))
    np.testing.assert_allclose(accumulator.jvp(product), 4 * W**2 * V)


@pytest.mark.parametrize("kind", ["batches", "gauss-newton", "scaled", "inverse", "gradient"])
def test_no_matrix_is_a_constant_to_tapes_around_what_was_made_in_a_tape(kind):
    w, k = tf.Variable(W), tf.Variable(2.0, dtype=F)
    loss = lambda x: k * tf.reduce_mean(x) * tf.reduce_sum(w**4)  # noqa: E731
    data, v = (np.ones(4),), tf.constant(V)
    with tf.GradientTape() as outer:
        if kind == "gauss-newton":
            squares = lambda p: tf.reduce_sum((p - 1) ** 2)  # noqa: E731
            operator = hvp.GaussNewtonOperator(lambda: k * w**2, squares, w)
        else:
            operator = hvp.HessianOperator(loss, w, data, batch_size=2)
        inverse = hvp.ExactInverse(operator) if kind == "inverse" else None
        with tf.GradientTape() as tape:
            if kind == "scaled":
                product = hvp.solve(2 * operator, v).x
            elif kind == "inverse":
                product = inverse.product(v)
            elif kind == "gradient":
                product = operator.gradient_tensors()
            else:
                product = operator.product(v)
            total = tf.reduce_sum(product)
        with pytest.raises(hvp.SecondDerivativeError):
            np.asarray(tape.gradient(total, k))
    del outer


def test_linearizations_at_old_values_have_no_gradient_in_variables():
    w = tf.Variable(W)
    J = hvp.linearize(lambda: w**3, w)
    with tf.GradientTape() as tape:
        early = J.jvp(tf.constant(V))
    w.assign(2 * W)
    with tf.GradientTape() as late_tape:
        late = J.jvp(tf.constant(V))
    np.testing.assert_allclose(late, 3 * W**2 * V)
    with pytest.raises(hvp.StaleOperatorError, match="Variable"):
        np.asarray(tape.gradient(early, w))
    with pytest.raises(hvp.SecondDerivativeError):
        np.asarray(late_tape.gradient(late, w))
    w.assign(W)

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            product = J.jvp(tf.constant(V))
        return tape.gradient(product, w)

    with pytest.raises(hvp.SecondDerivativeError):  # where nothing tells whether they changed
        gradient()


@pytest.mark.parametrize(
    "options", [{}, {"damping": 0.3}, {"batch_size": 3}, {"engine": "tape"}, {"recompute": False}]
)
def test_the_gradient_as_tensors_has_the_derivative_of_differences(options):
    loss, variables, data = network()
    H = hvp.HessianOperator(loss, variables, data, **options)

    def penalty():
        return sum(tf.reduce_sum(part**3) for part in H.gradient_tensors())

    with tf.GradientTape() as outer, tf.GradientTape() as tape:
        value = penalty()
        assert H.flatten(H.gradient_tensors()).numpy() == pytest.approx(H.gradient, rel=1e-12)
    gradient = tape.gradient(value, variables)
    assert all(tf.is_tensor(part) for part in gradient)
    flat = H.flatten(gradient).numpy()
    direction = np.random.default_rng(2).standard_normal(H.shape[0])
    parts, h, ends = H.unflatten(tf.constant(direction)), 1e-5, []
    for sign in (1, -2):
        for variable, part in zip(variables, parts):
            variable.assign_add(sign * h * part)
        H.refresh()
        ends.append(float(penalty()))
    assert flat @ direction == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-5)
    del outer


def test_the_gradient_of_another_matrix_has_no_derivative():
    _loss, variables, data = network()

    def squares(p, y):
        return tf.reduce_mean((p - y) ** 2)

    G = hvp.GaussNewtonOperator(
        lambda x: tf.tanh(x @ variables[0]) @ variables[1], squares, variables, data
    )
    with tf.GradientTape() as tape:
        total = sum(tf.reduce_sum(part) for part in G.gradient_tensors())
    with pytest.raises(hvp.SecondDerivativeError):
        np.asarray(tape.gradient(total, variables)[0])


@pytest.mark.parametrize("draws", ["seeded", "unseeded"])
def test_a_third_derivative_has_the_random_numbers_of_the_product(draws):
    """The Hessian is diagonal, `6 m w`, with the mask `m` of the evaluation."""
    w = tf.Variable([1.0, 2.0, 3.0])
    seed = keras.random.SeedGenerator(3)

    def loss():
        if draws == "seeded":
            return tf.reduce_sum(keras.random.dropout(w**3, 0.5, seed=seed))
        return tf.reduce_sum(tf.nn.dropout(w**3, 0.5))

    H = hvp.HessianOperator(loss, w)

    def gradient():
        with tf.GradientTape() as tape:
            product = H.product(tf.ones(3))
            total = tf.reduce_sum(product)
        return tape.gradient(total, w), product

    if draws == "unseeded":
        with pytest.raises(hvp.SecondDerivativeError):
            np.asarray(gradient()[0])
        return
    for _ in range(3):
        slope, product = gradient()
        np.testing.assert_allclose(slope, product / w, rtol=1e-5)
        loss()  # draws other numbers
    with pytest.raises(hvp.SecondDerivativeError):
        tf.function(gradient)()


@pytest.mark.parametrize("at", [[0.0, 1.0, 2.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
@pytest.mark.few(1)
def test_third_derivatives_of_products_with_zeros(at):
    w = tf.Variable(np.reshape(at, (1, 3)))
    u, v = np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 7.0])
    expected = hvp.third_order_product(lambda: w[0, 0] * w[0, 1] * w[0, 2], w, u, v)
    np.testing.assert_allclose(expected, [29, 19, 13])
    for axis in (None, 1, [1, 0]):
        found = hvp.third_order_product(lambda a=axis: tf.reduce_sum(tf.reduce_prod(w, a)), w, u, v)
        np.testing.assert_allclose(found, expected)


def test_a_third_derivative_that_does_not_exist_is_refused():
    w = tf.Variable([1.0, 2.0, 3.0])
    with pytest.raises(hvp.InvalidVariablesError, match="depends on none"):
        hvp.third_order_product(lambda: tf.constant(1.0), w, np.ones(3), np.ones(3))
    linear = hvp.third_order_product(lambda: tf.reduce_sum(w), w, np.ones(3), np.ones(3))
    np.testing.assert_array_equal(linear, np.zeros(3))
    with pytest.raises(hvp.NonFiniteError, match="1 entries"):
        hvp.third_order_product(lambda: tf.reduce_sum(tf.sqrt(w - 1)), w, np.ones(3), np.ones(3))


@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.parametrize("kind", ["product", "gradient_tensors", "solve", "jvp", "value", "data"])
@pytest.mark.few(3)
def test_tensors_that_the_loss_reads_have_gradients(kind, engine):
    """With `k` in place of `k z**2` in the losses above, and `k = exp(c)` computed outside."""
    w, c = tf.Variable(W), tf.Variable(0.7, dtype=F)
    with tf.GradientTape() as tape:
        k = tf.exp(c)
        if kind in ("jvp", "value"):
            operator = hvp.JacobianOperator(lambda: k * w**3, w, engine=engine)
        elif kind == "data":
            loss = lambda x: tf.reduce_mean(x) * tf.reduce_sum(w**4) / 12  # noqa: E731
            operator = hvp.HessianOperator(loss, w, (k * tf.ones(4, F),), engine=engine)
        else:
            loss = lambda: k * tf.reduce_sum(w**4) / 12  # noqa: E731
            operator = hvp.HessianOperator(loss, w, engine=engine)
        if kind in ("value", "gradient_tensors"):
            found = operator.value if kind == "value" else operator.gradient_tensors()
        elif kind == "solve":
            found = hvp.solve(operator, tf.constant(V), rtol=1e-12).x
        else:
            found = getattr(operator, "product" if kind == "data" else kind)(tf.constant(V))
        total = tf.reduce_sum(found * V)
    expected = {
        "product": np.exp(0.7) * np.sum(W**2 * V**2),
        "data": np.exp(0.7) * np.sum(W**2 * V**2),
        "gradient_tensors": np.exp(0.7) * np.sum(W**3 * V) / 3,
        "solve": -np.exp(-0.7) * np.sum(V**2 / W**2),
        "jvp": np.exp(0.7) * 3 * np.sum(W**2 * V**2),
        "value": np.exp(0.7) * np.sum(W**3 * V),
    }
    np.testing.assert_allclose(tape.gradient(total, c), expected[kind], rtol=1e-9)


@pytest.mark.parametrize("kind", ["jacobian", "gauss-newton", "refreshed"])
def test_the_tape_engine_multiplies_under_a_tape_first(kind):
    w = tf.Variable(W)
    if kind == "jacobian":
        operator, diagonal = hvp.JacobianOperator(lambda: w**3, w, engine="tape"), 3 * W**2
    elif kind == "gauss-newton":
        squares = lambda p: tf.reduce_sum(p**2) / 2  # noqa: E731
        operator = hvp.GaussNewtonOperator(lambda: w**3, squares, w, engine="tape")
        diagonal = 9 * W**4
    else:
        loss = lambda: tf.reduce_sum(w**4)  # noqa: E731
        operator = hvp.HessianOperator(loss, w, engine="tape", on_stale="refresh")
        w.assign(2 * W)
        diagonal = 48 * W**2
    with tf.GradientTape() as tape:
        product = operator.product(tf.constant(V))
    np.testing.assert_allclose(product, diagonal * V)
    np.testing.assert_allclose(operator.product(tf.constant(V)), diagonal * V)
    if kind == "refreshed":
        np.testing.assert_allclose(tape.gradient(product, w), 24 * 2 * W * V)


@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize("way", ["tapes", "accumulator outside", "accumulator inside"])
@pytest.mark.few(3)
def test_second_derivatives_of_solutions(way, is_block):
    """The sum of the solution is `sum(1 / w**2)`."""
    w, ones = tf.Variable(W), tf.ones(3, F)
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    b = ones[:, tf.newaxis] if is_block else ones
    outer = tf.autodiff.ForwardAccumulator(w, ones) if "outside" in way else tf.GradientTape()
    inner = tf.autodiff.ForwardAccumulator(w, ones) if "inside" in way else tf.GradientTape()
    with outer:
        with inner:
            x = hvp.solve(H, b, rtol=1e-12).x
            total = tf.reduce_sum(x)
        slope = tf.reduce_sum(inner.jvp(x) if "inside" in way else inner.gradient(total, w))
    if "outside" in way:
        np.testing.assert_allclose(outer.jvp(slope), np.sum(6 / W**4), rtol=1e-9)
    else:
        np.testing.assert_allclose(outer.gradient(slope, w), 6 / W**4, rtol=1e-9)


def test_a_tape_around_an_accumulator_that_follows_the_right_hand_side():
    w, ones = tf.Variable(W), tf.ones(3, F)
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    with tf.GradientTape() as tape:
        with tf.autodiff.ForwardAccumulator(ones, ones) as accumulator:
            x = hvp.solve(H, ones, rtol=1e-12).x
        tangent = accumulator.jvp(x)
    np.testing.assert_allclose(tape.gradient(tangent, w), -2 / W**3, rtol=1e-9)


@pytest.mark.parametrize("on_stale", ["raise", "refresh"])
@pytest.mark.parametrize("kind", ["product", "gradient_tensors", "solve", "value"])
def test_a_gradient_at_another_point_is_an_error(kind, on_stale):
    w, c = tf.Variable(W), tf.Variable(2.0, dtype=F, trainable=False)
    v = tf.constant(V)
    if kind == "value":
        operator = hvp.JacobianOperator(lambda: c * w**3, w, on_stale=on_stale)
    else:
        loss = lambda: c * tf.reduce_sum(w**4)  # noqa: E731
        operator = hvp.HessianOperator(loss, w, on_stale=on_stale)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(v)
        if kind == "solve":
            found = hvp.solve(operator, v).x
        elif kind == "value":
            found = operator.value
        else:
            found = operator.product(v) if kind == "product" else operator.gradient_tensors()
    c.assign(3.0)
    if on_stale == "raise":
        operator.refresh()
    for source in (w, v) if kind in ("product", "solve") else (w,):
        with pytest.raises(hvp.StaleOperatorError):
            np.asarray(tape.gradient(found, source))


def test_a_gradient_of_a_product_with_other_factors_is_an_error():
    kernel, v = tf.Variable(np.diag(W)), tf.ones([3, 3], F)
    loss = lambda p, y: tf.reduce_mean(tf.reduce_sum((p - y) ** 2, 1)) / 2  # noqa: E731
    data = (np.eye(3), np.ones((3, 3)))
    K = hvp.KFAC(lambda x: tf.tanh(x @ kernel), loss, kernel, data)
    block = K.block(kernel)

    def product():
        with tf.GradientTape() as tape:
            tape.watch(v)
            return tape, block.product(v)

    tape, before = product()
    same = tape.gradient(before, v)
    tape, before = product()
    kernel.assign(2 * kernel)
    K.refresh()
    with pytest.raises(hvp.StaleOperatorError):
        tape.gradient(before, v)
    tape, after = product()
    np.testing.assert_allclose(tape.gradient(after, v), block.product(v))  # it is symmetric
    assert not np.allclose(same, after)


@pytest.mark.parametrize("source", ["variable", "vector"])
def test_a_gradient_at_another_point_in_a_graph_is_nan(source):
    w, c = tf.Variable(W), tf.Variable(2.0, dtype=F, trainable=False)
    H = hvp.HessianOperator(lambda: c * tf.reduce_sum(w**4), w, on_stale="refresh")

    @tf.function
    def gradient(factor):
        v = tf.constant(V)
        with tf.GradientTape() as tape:
            tape.watch(v)
            product = H.product(v)
        c.assign(factor * c)
        return tape.gradient(product, w if source == "variable" else v)

    right = 48 * W * V if source == "variable" else 24 * W**2
    np.testing.assert_allclose(gradient(tf.constant(1.0, F)), right)
    assert np.isnan(gradient(tf.constant(2.0, F))).all()


def test_vectorized_jacobians_of_products_whose_random_numbers_are_drawn_again_are_refused():
    w, x = tf.Variable(tf.ones(8)), tf.ones([1, 8])
    drop = keras.layers.Dropout(0.5, seed=3)
    H = hvp.HessianOperator(lambda: tf.reduce_sum(drop(x * w, training=True) ** 4) / 12, w)
    with tf.GradientTape(persistent=True) as tape:
        product = H.product(tf.ones(8))
    drop(x, training=True)
    jacobian = tape.jacobian(product, w, experimental_use_pfor=False)
    np.testing.assert_allclose(np.diag(jacobian), 2 * product)
    with pytest.raises(hvp.SecondDerivativeError):
        np.asarray(tape.jacobian(product, w))


def test_a_loss_that_cannot_be_traced_has_gradients_in_vectors():
    w, t = tf.Variable(W), tf.Variable(2.0)
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) if t.numpy() > 1 else 0.0, w)
    assert "could not be traced" in H.stats.note
    v = tf.constant(V)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(v)
        product = H.product(v)
    np.testing.assert_allclose(tape.gradient(product, v), 12 * W**2)
    with pytest.raises(hvp.SecondDerivativeError):
        np.asarray(tape.gradient(product, w))


def test_variables_on_the_right_and_products_of_one_call_under_a_tape():
    w, v = tf.Variable(W), tf.constant(V)
    loss = lambda: tf.reduce_sum(w**4) / 12  # noqa: E731
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(v)
        x = hvp.solve(hvp.HessianOperator(loss, w), w, rtol=1e-12).x
        product = hvp.hessian_vector_product(loss, w, v)
    np.testing.assert_allclose(tape.gradient(x, w), -1 / W**2, rtol=1e-9)
    np.testing.assert_allclose(tape.gradient(product, v), W**2)
    np.testing.assert_allclose(tape.gradient(product, w), 2 * W * V)


def test_an_accumulator_of_a_hyperparameter_around_a_tape():
    w, t = tf.Variable(W), tf.Variable(2.0, dtype=F)
    H = hvp.HessianOperator(lambda: t * tf.reduce_sum(w**4), w)
    with tf.autodiff.ForwardAccumulator(t, tf.constant(1.0, F)) as accumulator:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(H.gradient_tensors())
        slope = tape.gradient(total, w)
    np.testing.assert_allclose(accumulator.jvp(slope), 12 * W**2)


def test_vectorized_jacobians_of_solutions_are_refused():
    w, b = tf.Variable(W), tf.ones(3, F)
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(b)
        x = hvp.solve(H, b, rtol=1e-12).x
    jacobian = tape.jacobian(x, b, experimental_use_pfor=False)  # the remedy
    np.testing.assert_allclose(jacobian, np.diag(W**-2), atol=1e-12)
    with pytest.raises(hvp.GraphModeError, match="experimental_use_pfor"):
        tape.jacobian(x, b)


def test_the_tape_engine_calls_the_loss_again_for_gradients_of_products_after_a_refresh():
    w, scale = tf.Variable(W), 1.0
    H = hvp.HessianOperator(lambda: scale * tf.reduce_sum(w**4) / 12, w, engine="tape")
    for scale in (1.0, 5.0):
        H.refresh()
        with tf.GradientTape() as tape:
            product = H.product(tf.constant(V))
        np.testing.assert_allclose(product, scale * W**2 * V)
        np.testing.assert_allclose(tape.gradient(product, w), 2 * scale * W * V)


def test_a_function_that_multiplies_does_not_keep_the_data():
    w = tf.Variable(W)

    def multiplied():
        x = tf.constant(np.ones((100, 3)))
        loss = lambda x: tf.reduce_mean(tf.linalg.matvec(x, w) ** 4)  # noqa: E731
        with hvp.HessianOperator(loss, w, (x,)) as H:
            multiply = tf.function(weakref.proxy(H).product)
            concrete = multiply.get_concrete_function(tf.TensorSpec([3], F))
        return concrete, weakref.ref(x)

    function, data = multiplied()
    assert function is not None
    gc.collect()
    assert data() is None


@pytest.mark.parametrize("sums", [1, 2, 3])
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.few(2)
def test_what_is_refused_may_be_added_up(sums, in_graph):
    """With gradients that are dense, sparse, and refused as well, of several variables."""
    w, rows = [tf.Variable(k * tf.ones(3)) for k in (1.0, 2.0)], tf.Variable(tf.ones((3, 2)))
    x = np.eye(3, dtype=np.float32)

    def loss(x):
        dense = tf.reduce_mean(tf.linalg.matvec(x, w[0] + w[1]) ** 4)
        return dense + tf.reduce_mean(tf.gather(rows, [0, 1]) ** 4)

    H = hvp.HessianOperator(loss, [*w, rows], (x,), batch_size=2)

    def penalized(with_loss, use):
        with tf.GradientTape() as tape:
            total = sum(tf.reduce_sum(H.product(tf.ones(12))) for _ in range(sums))
            total += loss(x) if with_loss else 0.0
        return use(tape.gradient(total, [*w, rows]))

    uses = {
        "product": lambda found: [2 * found[0], 2 * found[2]],
        "power": lambda found: found[0] ** 2,
        "entry": lambda found: found[1][0],
        "optimizer": lambda found: keras.optimizers.SGD().apply(found, [*w, rows]),
    }
    for name, use in uses.items():
        for with_loss in (False, True):
            run = tf.function(penalized, autograph=False) if in_graph else penalized
            if not (in_graph and name == "optimizer"):
                with pytest.raises(hvp.SecondDerivativeError, match="batch_size"):
                    run(with_loss, use)
    np.testing.assert_array_equal(tf.add_n([w[0], w[1]]), 3 * np.ones(3))


def test_a_gradient_after_an_assignment_says_what_to_do():
    w = tf.Variable(W)
    for on_stale in ("raise", "refresh", "ignore"):
        H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4), w, on_stale=on_stale)
        with tf.GradientTape() as tape:
            product = H.product(tf.ones(3, F))
        w.assign(w + 1.0)
        with pytest.raises(hvp.StaleOperatorError, match="before variables are assigned"):
            2 * tape.gradient(product, w)
