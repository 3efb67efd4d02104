"""What random programs are made of.

A step takes a real matrix of any shape, and a function that gives it parameters of the shapes it
asks for; it returns a real tensor of any shape. Values stay near one in size, so that differences
of gradients are exact enough to judge by.
"""

import keras
import numpy as np
import tensorflow as tf

import hvp


def squared(x):
    """A square matrix, near symmetric positive definite, out of any matrix."""
    x = tf.tanh(x)[:, :4]
    return tf.matmul(x, x, transpose_a=True) / tf.cast(tf.shape(x)[0], x.dtype) + _eye(x)


def _eye(x):
    """The unit matrix and distinct numbers on its diagonal: eigenvalues stay apart."""
    size = x.shape[1]
    return tf.linalg.diag(tf.cast(tf.range(1, size + 1), x.dtype))


def positive(x):
    return tf.nn.softplus(x) + 0.5


def image(x):
    """An image of at least four by four, with two channels."""
    rows, columns = x.shape
    x = tf.tile(x, [-(-4 // rows), -(-4 // columns)])[:6, :6]
    return tf.stack([x, tf.sin(x)], axis=-1)[tf.newaxis]


def channels(x):
    """Two images of at least four by four, with four channels."""
    x = tf.concat([image(x), tf.cos(2 * image(x))], axis=-1)
    return tf.concat([x, tf.sin(3 * x)], axis=0)


def volume(x):
    """A volume of at least four by four by three, with two channels."""
    return tf.stack([image(x), tf.cos(image(x)), tf.sin(3 * image(x))], axis=3)


def _of_scaled(function):
    return lambda x, p: function(x * p(x.shape[1]))


def _of_square(function):
    return lambda x, p: function(squared(x * p(x.shape[1])))


def unit(x):
    """Numbers between 0.1 and 0.9."""
    return 0.1 + 0.8 * tf.sigmoid(x)


def indices(x, below):
    """Whole numbers, one for each row, that depend on nothing."""
    return tf.constant([(7 * i + 3) % below for i in range(x.shape[0])])


@tf.custom_gradient
def cubed(x):
    return x**3, lambda upstream: 3 * upstream * x**2


LAYERS = {
    "dense": lambda x, p: tf.tanh(x @ p(x.shape[1], 3) + p(3)),
    "residual": lambda x, p: x + tf.sin(x @ p(x.shape[1], x.shape[1])),
    "gated": lambda x, p: tf.nn.silu(x @ p(x.shape[1], 2)) * tf.sigmoid(x @ p(x.shape[1], 2)),
    "conv1d": lambda x, p: tf.nn.conv1d(x[tf.newaxis], p(2, x.shape[1], 2), 1, "SAME"),
    "conv2d": lambda x, p: tf.nn.conv2d(image(x), p(2, 2, 2, 2), 1, "SAME"),
    "strided conv2d": lambda x, p: tf.nn.conv2d(image(x), p(3, 3, 2, 1), 2, "VALID"),
    "padded conv2d": lambda x, p: tf.nn.conv2d(
        image(x), p(2, 2, 2, 1), 1, [[0, 0], [1, 0], [0, 1], [0, 0]]
    ),
    "depthwise conv": lambda x, p: tf.nn.depthwise_conv2d(
        image(x), p(2, 2, 2, 2), [1, 1, 1, 1], "SAME"
    ),
    "separable conv": lambda x, p: tf.nn.separable_conv2d(
        image(x), p(2, 2, 2, 1), p(1, 1, 2, 2), [1, 1, 1, 1], "SAME"
    ),
    "transposed conv": lambda x, p: tf.nn.conv2d_transpose(
        image(x)[:, :3, :3], p(2, 2, 1, 2), [1, 6, 6, 1], 2, "SAME"
    ),
    "conv3d": lambda x, p: tf.nn.conv3d(
        image(x)[..., tf.newaxis], p(2, 2, 2, 1, 1), [1, 1, 1, 1, 1], "SAME"
    ),
    "strided depthwise conv": lambda x, p: tf.nn.depthwise_conv2d(
        channels(x), p(3, 3, 4, 2), [1, 2, 2, 1], "SAME"
    ),
    "dilated depthwise conv": lambda x, p: tf.nn.depthwise_conv2d(
        channels(x), p(2, 2, 4, 1), [1, 1, 1, 1], "SAME", dilations=[2, 2]
    ),
    "transposed conv1d": lambda x, p: tf.nn.conv1d_transpose(
        image(x)[0], p(2, 3, 2), [image(x).shape[1], 2 * image(x).shape[2], 3], 2, "SAME"
    ),
    "transposed conv3d": lambda x, p: tf.nn.conv3d_transpose(
        image(x)[:, :2, :2, :, tf.newaxis], p(2, 2, 2, 2, 1), [1, 4, 4, 4, 2], 2, "SAME"
    ),
    "strided conv3d": lambda x, p: tf.nn.conv3d(
        volume(x), p(2, 2, 2, 2, 3), [1, 2, 2, 1, 1], "VALID"
    ),
    "average pool": lambda x, p: tf.nn.avg_pool2d(image(x), 2, 2, "VALID"),
    "average pool 1d": lambda x, p: tf.nn.avg_pool1d(image(x)[0] * p(2), 2, 1, "SAME"),
    "max pool": lambda x, p: tf.nn.max_pool2d(image(x) * p(1), 2, 2, "VALID"),
    "strided max pool": lambda x, p: tf.nn.max_pool2d(channels(x) * p(4), 3, 2, "SAME"),
    "max pool 1d": lambda x, p: tf.nn.max_pool1d(image(x)[0] * p(1), 2, 1, "SAME"),
    "same max pool": lambda x, p: tf.nn.max_pool2d(image(x) * p(1), 2, 1, "SAME"),
    "layer norm": lambda x, p: _normalized(x, 1) * p(x.shape[1]),
    "batch norm": lambda x, p: _normalized(x, 0) + p(x.shape[1]),
    "instance norm": lambda x, p: _normalized(image(x), (1, 2)) * p(2),
    "l2 normalize": lambda x, p: tf.math.l2_normalize(x * p(1), axis=1, epsilon=0.1),
    "attention": lambda x, p: _attention(x, p(x.shape[1], 3), p(x.shape[1], 3)),
    "masked attention": lambda x, p: _masked_attention(x, p(x.shape[1], x.shape[1])),
    "multi-head attention": lambda x, p: _keras(
        x, p, lambda: keras.layers.MultiHeadAttention(2, 2), lambda layer, x: layer(x, x)
    ),
    "keras dense": lambda x, p: _keras(x, p, lambda: keras.layers.Dense(2, activation="gelu")),
    "keras layer norm": lambda x, p: _keras(x, p, keras.layers.LayerNormalization),
    "lstm": lambda x, p: _keras(x, p, lambda: keras.layers.LSTM(2)),
    "gru": lambda x, p: _keras(x, p, lambda: keras.layers.GRU(2, return_sequences=True)),
    "simple rnn": lambda x, p: _keras(x, p, lambda: keras.layers.SimpleRNN(2, unroll=True)),
    "dropout": lambda x, p: tf.nn.experimental.stateless_dropout(x * p(1), 0.3, [1, 2]),
    "einsum": lambda x, p: tf.einsum("ij,jk,lk->il", x, p(x.shape[1], 2), p(3, 2)),
    "batched einsum": lambda x, p: tf.einsum("...i,ij->...j", image(x), p(2, 3)),
    "batched matmul": lambda x, p: tf.matmul(p(2, 1, 3, x.shape[1]), x, transpose_b=True) ** 2,
    "repeated einsum": lambda x, p: tf.einsum("ij,jkk->ik", x, p(x.shape[1], 2, 2)),
    "tensordot": lambda x, p: tf.tensordot(channels(x), p(4, 2, 3), [[3], [0]]),
    "bilinear": lambda x, p: tf.einsum("ij,jkl,ik->il", x, p(x.shape[1], x.shape[1], 2), x),
    "custom gradient": lambda x, p: cubed(tf.tanh(x) * p(1)),
    "recomputed": lambda x, p: _recomputed(x, p(x.shape[1], 2)),
}
INDEXING = {
    "gather": lambda x, p: x * tf.gather(p(5, x.shape[1]), indices(x, 5)),
    "gather columns": lambda x, p: tf.gather(x * p(1), [0, 0, x.shape[1] - 1], axis=1),
    "gather_nd": lambda x, p: tf.gather_nd(x * p(1), [[0, 0], [x.shape[0] - 1, x.shape[1] - 1]]),
    "embedding": lambda x, p: tf.nn.embedding_lookup(p(6, 2), indices(x, 6)) * x[:, :1],
    "batched gather": lambda x, p: tf.gather(
        x * p(1), indices(x, x.shape[1])[:, tf.newaxis], batch_dims=1
    ),
    "boolean mask": lambda x, p: tf.ensure_shape(
        tf.boolean_mask(x * p(1), np.arange(x.shape[0]) % 2 == 0),
        [-(-x.shape[0] // 2), x.shape[1]],
    ),
    "scatter": lambda x, p: tf.scatter_nd(indices(x, 3)[:, tf.newaxis], x * p(1), [3, x.shape[1]]),
    "scatter update": lambda x, p: tf.tensor_scatter_nd_update(x, [[0]], [p(x.shape[1])]),
    "scatter add": lambda x, p: tf.tensor_scatter_nd_add(x, [[0], [0]], p(2, x.shape[1])),
    "scatter max": lambda x, p: tf.tensor_scatter_nd_max(x, [[0]], p(1, x.shape[1])),
    "segment sum": lambda x, p: tf.ensure_shape(
        tf.math.segment_sum(x * p(1), np.arange(x.shape[0]) // 2),
        [-(-x.shape[0] // 2), x.shape[1]],
    ),
    "segment mean": lambda x, p: tf.ensure_shape(
        tf.math.segment_mean(x * p(1), np.arange(x.shape[0]) // 2),
        [-(-x.shape[0] // 2), x.shape[1]],
    ),
    "segment max": lambda x, p: tf.math.unsorted_segment_max(x * p(1), indices(x, 2), 2),
    "unsorted segment sum": lambda x, p: tf.math.unsorted_segment_sum(x * p(1), indices(x, 2), 3),
    "unsorted segment mean": lambda x, p: tf.math.unsorted_segment_mean(x * p(1), indices(x, 2), 3),
    "unsorted segment product": lambda x, p: tf.math.unsorted_segment_prod(
        positive(x * p(1)), indices(x, 2), 2
    ),
    "segment min": lambda x, p: tf.ensure_shape(
        tf.math.segment_min(x * p(1), np.arange(x.shape[0]) // 2),
        [-(-x.shape[0] // 2), x.shape[1]],
    ),
    "unsorted segment min": lambda x, p: tf.math.unsorted_segment_min(x * p(1), indices(x, 2), 2),
    "unsorted segment sqrt n": lambda x, p: tf.math.unsorted_segment_sqrt_n(
        x * p(1), indices(x, 2), 2
    ),
    "tanh of segment sum": lambda x, p: tf.tanh(
        tf.math.unsorted_segment_sum(x * p(1), indices(x, 3), 3)
    ),
    "tanh of scatter": lambda x, p: tf.tanh(
        tf.scatter_nd(indices(x, 3)[:, tf.newaxis], x * p(1), [3, x.shape[1]])
    ),
    "dynamic partition": lambda x, p: tf.dynamic_stitch(
        tf.dynamic_partition(tf.range(x.shape[0]), np.arange(x.shape[0]) % 2, 2),
        tf.dynamic_partition(tf.sin(x * p(1)), np.arange(x.shape[0]) % 2, 2),
    ),
    "sort": lambda x, p: tf.sort(x * p(1), axis=0) * p(x.shape[1]),
    "top k": lambda x, p: tf.math.top_k(x * p(1), 1).values,
    "one hot": lambda x, p: tf.one_hot(indices(x, 3), 3, dtype=x.dtype) @ p(3, 2) * x[:, :1],
    "slice": lambda x, p: x[:, ::-1] * p(x.shape[1]),
    "strided slice": lambda x, p: image(x)[:, ::2, 1::2] * p(2),
    "transpose": lambda x, p: tf.transpose(image(x), [0, 3, 1, 2]) * p(1),
    "concat": lambda x, p: tf.concat([x, tf.sin(x), p(1, x.shape[1])], axis=0),
    "split": lambda x, p: tf.add_n(tf.split(image(x) * p(2), 2, axis=3)),
    "unstack": lambda x, p: tf.stack(tf.unstack(x * p(1), axis=1)[::-1], axis=0),
    "tile": lambda x, p: tf.tile(x * p(1), [2, 1]) * p(2 * x.shape[0], 1),
    "repeat": lambda x, p: tf.repeat(x, 2, axis=1) * p(2 * x.shape[1]),
    "broadcast": lambda x, p: tf.broadcast_to(p(1, x.shape[1]), x.shape) * x,
    "roll": lambda x, p: tf.roll(x, 1, axis=0) * x * p(1),
    "reverse": lambda x, p: tf.reverse(x, [0]) * x * p(1),
    "reverse sequence": lambda x, p: (
        tf.reverse_sequence(x * p(1), 1 + indices(x, x.shape[1]), seq_axis=1) * x
    ),
    "zero pad": lambda x, p: tf.pad(x * p(1), [[1, 0], [0, 1]]),
    "reflect pad": lambda x, p: tf.pad(
        image(x) * p(1), [[0, 0], [1, 1], [1, 0], [0, 0]], "REFLECT"
    ),
    "symmetric pad": lambda x, p: tf.pad(x * p(1), [[1, 1], [0, 1]], "SYMMETRIC"),
    "space to depth": lambda x, p: tf.nn.space_to_depth(image(x)[:, :4, :4] * p(2), 2),
    "depth to space": lambda x, p: tf.nn.depth_to_space(
        tf.concat([image(x), image(x) ** 2], 3) * p(4), 2
    ),
    "space to batch": lambda x, p: tf.space_to_batch(
        image(x)[:, :4, :4] * p(2), [2, 2], [[0, 0], [0, 0]]
    ),
    "batch to space": lambda x, p: tf.batch_to_space(
        tf.concat([image(x), image(x) ** 2] * 2, 0) * p(2), [2, 2], [[1, 0], [0, 1]]
    ),
    "gather along two axes": lambda x, p: tf.gather(
        channels(x) * p(4), [[1, 0], [3, 3]], axis=3, batch_dims=1
    ),
    "band of diagonals": lambda x, p: tf.linalg.diag(
        tf.stack([x[0], tf.sin(x[0])]) * p(x.shape[1]), k=(0, 1)
    ),
    "set diagonals": lambda x, p: tf.linalg.set_diag(
        squared(x), p(2, min(4, x.shape[1])), k=(-1, 0)
    ),
    "patches of a volume": lambda x, p: tf.extract_volume_patches(
        volume(x) * p(2), [1, 2, 2, 2, 1], [1, 2, 2, 1, 1], "VALID"
    ),
    "frames": lambda x, p: tf.signal.frame(tf.reshape(image(x) * p(2), [2, -1]), 4, 3),
    "overlapping frames": lambda x, p: tf.signal.overlap_and_add(x * p(1), 1),
    "patches": lambda x, p: tf.image.extract_patches(
        image(x) * p(1), [1, 2, 2, 1], [1, 1, 1, 1], [1, 1, 1, 1], "VALID"
    ),
    "band part": lambda x, p: tf.linalg.band_part(squared(x), 1, 0) * p(1),
    "diag": lambda x, p: tf.linalg.diag(x[0]) @ p(x.shape[1], 2),
    "diag part": lambda x, p: tf.linalg.diag_part(squared(x)) * p(1),
    "set diag": lambda x, p: tf.linalg.set_diag(squared(x), p(min(4, x.shape[1]))),
    "sparse matmul": lambda x, p: tf.sparse.sparse_dense_matmul(
        tf.sparse.SparseTensor([[0, 0], [1, x.shape[0] - 1]], p(2), [2, x.shape[0]]), x
    ),
}
CONTROL_FLOW = {
    "while": lambda x, p: _loop(x, p(x.shape[1], x.shape[1])),
    "while of known length": lambda x, p: _loop(x, p(x.shape[1], x.shape[1]), 3),
    "nested while": lambda x, p: _nested_loop(x, p(x.shape[1])),
    "cond": lambda x, p: tf.cond(
        tf.reduce_sum(x) > 0, _bind(tf.sin, x * p(x.shape[1])), _bind(tf.tanh, x * p(x.shape[1]))
    ),
    "cond of one": lambda x, p: _cond_of_one(x, p(x.shape[1])),
    "case": lambda x, p: tf.switch_case(
        tf.cast(tf.reduce_sum(x) > 0, tf.int32), [_bind(tf.sin, x * p(1)), _bind(tf.exp, -(x**2))]
    ),
    "scan": lambda x, p: _scan(x, p(x.shape[1])),
    "fold": lambda x, p: _fold(x, p(x.shape[1])),
    "map": lambda x, p: _map(x, p(x.shape[1])),
    "vectorized map": lambda x, p: _vectorized_map(x, p(x.shape[1], 2)),
    "tensor array": lambda x, p: _tensor_array(x, p(x.shape[1])),
    "tf.function": lambda x, p: tf.function(lambda a, b: tf.sin(a * b))(x, p(x.shape[1])),
    "autograph": lambda x, p: tf.function(_autograph)(x, p(x.shape[1])),
    "where": lambda x, p: tf.where(x > 0, tf.sin(x * p(1)), tf.tanh(x)),
    "clip": lambda x, p: tf.clip_by_value(x * p(1), -0.8, 0.8),
    "clip by norm": lambda x, p: tf.clip_by_norm(x * p(1), 0.5),
    "stop gradient": lambda x, p: x * tf.stop_gradient(tf.floor(9 * x)) * p(1),
    "floor": lambda x, p: (x - tf.floor(3 * x) / 3) * p(1),
    "argmax": lambda x, p: tf.gather(x, tf.argmax(x, axis=1), axis=1) * p(1),
    "floormod": lambda x, p: tf.math.floormod(x, 0.7) * p(1),
    "recomputed loop": lambda x, p: _recomputed_loop(x, p(x.shape[1], x.shape[1])),
    "recomputed branch": lambda x, p: _recomputed_branch(x, p(x.shape[1])),
}
REDUCTIONS = {
    "mean": lambda x, p: tf.reduce_mean(x * p(x.shape[1]), axis=1),
    "max": lambda x, p: tf.reduce_max(x * p(x.shape[1]), axis=0),
    "min": lambda x, p: tf.reduce_min(x * p(x.shape[1]), axis=1),
    "logsumexp": lambda x, p: tf.reduce_logsumexp(x * p(x.shape[1]), axis=1),
    "product": lambda x, p: tf.reduce_prod(positive(x * p(1)) / 2, axis=1),
    "variance": lambda x, p: tf.math.reduce_variance(x * p(1), axis=0),
    "std": lambda x, p: tf.math.reduce_std(tf.concat([x, x + p(1), x - 1], 0), axis=0),
    "euclidean norm": lambda x, p: tf.math.reduce_euclidean_norm(x + p(x.shape[1]), axis=1),
    "norm": lambda x, p: tf.norm(x + p(x.shape[1]), axis=0),
    "cumsum": lambda x, p: tf.cumsum(x * p(x.shape[1]), axis=1, reverse=True),
    "cumulative logsumexp": lambda x, p: tf.math.cumulative_logsumexp(x * p(1), axis=1),
    "cumprod": lambda x, p: tf.math.cumprod(positive(x * p(1)), axis=1, exclusive=True),
    "softmax": lambda x, p: tf.nn.softmax(x * p(x.shape[1])),
    "log softmax": lambda x, p: tf.nn.log_softmax(x * p(x.shape[1])),
    "moments": lambda x, p: tf.concat(tf.nn.moments(x * p(1), [0]), 0),
    "cross entropy": lambda x, p: tf.nn.softmax_cross_entropy_with_logits(
        tf.one_hot(indices(x, x.shape[1]), x.shape[1], dtype=x.dtype), x * p(1)
    ),
    "sparse cross entropy": lambda x, p: tf.nn.sparse_softmax_cross_entropy_with_logits(
        indices(x, x.shape[1]), x * p(1)
    ),
    "sigmoid cross entropy": lambda x, p: tf.nn.sigmoid_cross_entropy_with_logits(
        tf.fill(x.shape, tf.constant(0.3, x.dtype)), x * p(1)
    ),
    "keras losses": lambda x, p: keras.losses.huber(tf.zeros_like(x), x * p(1)),
    "log poisson": lambda x, p: tf.nn.log_poisson_loss(
        tf.fill(x.shape, tf.constant(2.0, x.dtype)), x * p(1), compute_full_loss=True
    ),
}
FUNCTIONS = {
    name: _of_scaled(function)
    for name, function in {
        "elu": tf.nn.elu,
        "selu": tf.nn.selu,
        "gelu": tf.nn.gelu,
        "approximate gelu": lambda x: tf.nn.gelu(x, approximate=True),
        "silu": tf.nn.silu,
        "silu with beta": lambda x: tf.nn.silu(x, 1.5),
        "relu": tf.nn.relu,
        "relu6": tf.nn.relu6,
        "leaky relu": tf.nn.leaky_relu,
        "crelu": tf.nn.crelu,
        "softplus": tf.nn.softplus,
        "mish": keras.activations.mish,
        "hard sigmoid": keras.activations.hard_sigmoid,
        "sigmoid": tf.sigmoid,
        "log sigmoid": tf.math.log_sigmoid,
        "exp": tf.exp,
        "expm1": tf.math.expm1,
        "log": lambda x: tf.math.log(positive(x)),
        "log1p": lambda x: tf.math.log1p(positive(x)),
        "sqrt": lambda x: tf.sqrt(positive(x)),
        "rsqrt": lambda x: tf.math.rsqrt(positive(x)),
        "reciprocal": lambda x: tf.math.reciprocal(positive(x)),
        "pow": lambda x: tf.pow(positive(x), unit(x)),
        "square": tf.square,
        "abs": tf.abs,
        "sin": tf.sin,
        "cos": tf.cos,
        "tan": lambda x: tf.tan(unit(x)),
        "asin": lambda x: tf.asin(unit(x)),
        "acos": lambda x: tf.acos(unit(x)),
        "atan": tf.atan,
        "atan2": lambda x: tf.atan2(x, positive(x)),
        "sinh": tf.sinh,
        "cosh": tf.cosh,
        "tanh": tf.tanh,
        "asinh": tf.asinh,
        "acosh": lambda x: tf.acosh(positive(x) + 1),
        "atanh": lambda x: tf.atanh(unit(x)),
        "erf": tf.math.erf,
        "erfc": tf.math.erfc,
        "erfinv": lambda x: tf.math.erfinv(unit(x)),
        "ndtri": lambda x: tf.math.ndtri(unit(x)),
        "lgamma": lambda x: tf.math.lgamma(positive(x)),
        "digamma": lambda x: tf.math.digamma(positive(x)),
        "polygamma": lambda x: tf.math.polygamma(tf.constant(1.0, x.dtype), positive(x)),
        "zeta": lambda x: tf.math.zeta(tf.constant(2.5, x.dtype), positive(x)),
        "igamma": lambda x: tf.math.igamma(tf.constant(1.5, x.dtype), positive(x)),
        "igammac": lambda x: tf.math.igammac(tf.constant(1.5, x.dtype), positive(x)),
        "betainc": lambda x: tf.math.betainc(
            tf.constant(1.5, x.dtype), tf.constant(2.5, x.dtype), unit(x)
        ),
        "xlogy": lambda x: tf.math.xlogy(positive(x), positive(x)),
        "xlog1py": lambda x: tf.math.xlog1py(x, positive(x)),
        "xdivy": lambda x: tf.math.xdivy(x, positive(x)),
        "divide no nan": lambda x: tf.math.divide_no_nan(x, positive(x)),
        "multiply no nan": lambda x: tf.math.multiply_no_nan(x, positive(x)),
        "bessel i0": tf.math.bessel_i0,
        "bessel i0e": tf.math.bessel_i0e,
        "bessel i1": tf.math.bessel_i1,
        "bessel i1e": lambda x: tf.math.bessel_i1e(positive(x)),
        "bessel j0": tf.math.special.bessel_j0,
        "bessel j1": tf.math.special.bessel_j1,
        "bessel k0": lambda x: tf.math.special.bessel_k0(positive(x)),
        "bessel k1e": lambda x: tf.math.special.bessel_k1e(positive(x)),
        "bessel y1": lambda x: tf.math.special.bessel_y1(positive(x)),
        "dawsn": tf.math.special.dawsn,
        "expint": lambda x: tf.math.special.expint(positive(x)),
        "fresnel cos": tf.math.special.fresnel_cos,
        "fresnel sin": tf.math.special.fresnel_sin,
        "spence": lambda x: tf.math.special.spence(positive(x)),
        "maximum": lambda x: tf.maximum(x, tf.sin(3 * x)),
        "minimum": lambda x: tf.minimum(x, tf.cos(3 * x)),
        "squared difference": lambda x: tf.math.squared_difference(x, tf.sin(x)),
        "bias add": lambda x: tf.nn.bias_add(x, x[0]),
        "bias add of channels": lambda x: tf.nn.bias_add(tf.cos(channels(x)), channels(x)[0, 0, 0]),
        "sobel edges": lambda x: tf.image.sobel_edges(image(x) ** 2),
        "rgb to gray": lambda x: tf.image.rgb_to_grayscale(tf.tile(x[..., None], [1, 1, 3])),
        "rgb to yuv": lambda x: tf.image.rgb_to_yuv(tf.stack([x, tf.sin(x), tf.cos(x)], axis=-1)),
        "total variation": lambda x: tf.image.total_variation(image(x) ** 3)[:, None],
    }.items()
}
LINEAR_ALGEBRA = {
    name: _of_square(function)
    for name, function in {
        "cholesky": tf.linalg.cholesky,
        "inverse": tf.linalg.inv,
        "solve": lambda a: tf.linalg.solve(a, tf.sin(a)),
        "triangular solve": lambda a: tf.linalg.triangular_solve(tf.linalg.cholesky(a), a),
        "least squares": lambda a: tf.linalg.lstsq(a, tf.sin(a), l2_regularizer=0.1),
        "determinant": lambda a: tf.linalg.det(a / tf.linalg.trace(a))[None],
        "log determinant": lambda a: tf.linalg.logdet(a)[None],
        "slogdet": lambda a: tf.linalg.slogdet(a)[1][None],
        "eigenvalues": tf.linalg.eigvalsh,
        "eigenvectors": lambda a: tf.linalg.eigh(a)[1] ** 2,
        "singular values": lambda a: tf.linalg.svd(a, compute_uv=False),
        "qr": lambda a: tf.linalg.qr(a)[1] ** 2,
        "matrix exponential": lambda a: tf.linalg.expm(a / 10),
        "matrix square root": tf.linalg.sqrtm,
        "trace": lambda a: tf.linalg.trace(a @ a)[None],
        "cross": lambda a: tf.linalg.cross(
            tf.pad(a, [[0, 0], [0, 3]])[:, :3], tf.pad(tf.sin(a), [[0, 0], [1, 3]])[:, :3]
        ),
        "tridiagonal": lambda a: tf.linalg.tridiagonal_solve(
            tf.stack([tf.sin(a[0]), tf.linalg.diag_part(a) + 2, tf.cos(a[0])]), a
        ),
        "kronecker": lambda a: tf.linalg.LinearOperatorKronecker(
            [tf.linalg.LinearOperatorFullMatrix(a)] * 2
        ).to_dense(),
        "adjoint solve": lambda a: tf.linalg.solve(a, tf.sin(a), adjoint=True),
        "adjoint triangular solve": lambda a: tf.linalg.triangular_solve(
            tf.linalg.cholesky(a), a, adjoint=True
        ),
        "batched inverse": lambda a: tf.linalg.inv(tf.stack([a, a @ a])),
        "batched cholesky": lambda a: tf.linalg.cholesky(tf.stack([a, a @ a])),
        "batched determinant": lambda a: tf.linalg.det(tf.stack([a, a @ a]) / 9),
        "banded solve": lambda a: tf.linalg.banded_triangular_solve(
            tf.stack([tf.linalg.diag_part(a) + 2, tf.sin(a[0])]), a
        ),
        "nuclear norm": lambda a: tf.linalg.trace(tf.linalg.sqrtm(a @ a))[None],
        "fft3d": lambda a: tf.math.real(tf.signal.ifft3d(tf.signal.fft3d(_complex(a)[None]) ** 2)),
        "rfft2d": lambda a: tf.signal.irfft2d(tf.signal.rfft2d(a, [4, 4]) ** 2, [4, 4]),
        "stft": lambda a: tf.abs(tf.signal.stft(tf.tile(a, [1, 8])[:, :8], 4, 2) + 3) ** 2,
        "fft": lambda a: tf.abs(tf.signal.fft(_complex(a)) + 3) ** 2,
        "rfft": lambda a: (
            tf.math.real(tf.signal.rfft(a, [8])) * tf.math.imag(tf.signal.rfft(tf.sin(a), [8]))
        ),
        "inverse rfft": lambda a: tf.signal.irfft(tf.signal.rfft(a, [8]) ** 2),
        "fft2d": lambda a: tf.math.real(tf.signal.ifft2d(tf.signal.fft2d(_complex(a)) ** 2)),
        "dct": lambda a: tf.signal.dct(a) ** 2,
        "complex product": lambda a: tf.math.imag(
            tf.complex(a, tf.sin(a)) @ tf.complex(tf.cos(a), a)
        ),
        "angle": lambda a: tf.math.angle(tf.complex(a, tf.sin(a) + 2)),
    }.items()
}
# What TensorFlow computes in float32 only, on the CPU.
FLOAT32_ONLY = {
    "grouped conv2d": lambda x, p: tf.nn.conv2d(channels(x), p(3, 3, 2, 4), 1, "SAME"),
    "strided grouped conv2d": lambda x, p: tf.nn.conv2d(channels(x), p(2, 2, 1, 4), 2, "VALID"),
    "dilated grouped conv2d": lambda x, p: tf.nn.conv2d(
        channels(x), p(2, 2, 2, 2), 1, "SAME", dilations=2
    ),
    "grouped conv1d": lambda x, p: tf.nn.conv1d(channels(x)[0], p(2, 2, 2), 1, "SAME"),
    "dilated conv2d": lambda x, p: tf.nn.conv2d(image(x), p(2, 2, 2, 3), 1, "SAME", dilations=2),
    "transposed grouped conv": lambda x, p: tf.nn.conv2d_transpose(
        channels(x)[:, :3, :3], p(2, 2, 2, 4), [2, 6, 6, 4], 2, "SAME"
    ),
    "average pool 3d": lambda x, p: tf.nn.avg_pool3d(volume(x) * p(2), 2, 1, "SAME"),
    "max pool 3d": lambda x, p: tf.nn.max_pool3d(volume(x) * p(2), 2, 1, "VALID"),
}
FAMILIES = {
    "layers": LAYERS,
    "indexing": INDEXING,
    "control flow": CONTROL_FLOW,
    "reductions": REDUCTIONS,
    "functions": FUNCTIONS,
    "linear algebra": LINEAR_ALGEBRA,
}


def _complex(a):
    return tf.complex(a, tf.sin(a))


def _normalized(x, axes):
    mean, variance = tf.nn.moments(x, axes, keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, None, None, 0.1)


def _attention(x, query, key):
    return tf.nn.softmax((x @ query) @ tf.transpose(x @ key)) @ x


def _masked_attention(x, w):
    scores = (x @ w) @ tf.transpose(x)
    mask = tf.linalg.band_part(tf.ones_like(scores), -1, 0)
    return tf.nn.softmax(tf.where(mask > 0, scores, -1e9)) @ x


def _keras(x, p, make, call=lambda layer, x: layer(x)):
    """A Keras layer, its weights taken from parameters."""
    layer = p.layer(make)
    return call(layer, x[tf.newaxis])


def _recomputed(x, w):
    return hvp.recompute(lambda x: tf.tanh(x @ w) * tf.reduce_sum(x))(x)


def _bind(function, *arguments):
    return lambda: function(*arguments)


def _loop(x, w, most=None):
    return tf.while_loop(
        lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, x), maximum_iterations=most
    )[1]


def _nested_loop(x, w):
    def inner(h):
        return tf.while_loop(lambda j, _: j < 2, lambda j, h: (j + 1, tf.sin(h * w)), (0, h))[1]

    return tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, inner(h) + x), (0, x))[1]


def _cond_of_one(x, w):
    """One branch does not use what the other does."""
    return tf.cond(tf.reduce_sum(x) < 1e6, lambda: tf.sin(x * w), lambda: x)


def _scan(x, w):
    return tf.scan(lambda h, row: tf.tanh(h * w + row), x)


def _fold(x, w):
    return tf.foldl(lambda h, row: tf.sin(h * w + row), x)


def _map(x, w):
    return tf.map_fn(lambda row: tf.sin(row * w), x)


def _vectorized_map(x, w):
    return tf.vectorized_map(lambda row: tf.tanh(tf.linalg.matvec(w, row, transpose_a=True)), x)


def _tensor_array(x, w):
    made = tf.TensorArray(x.dtype, x.shape[0], element_shape=x.shape[1:], clear_after_read=False)
    for i in range(x.shape[0]):
        made = made.write(i, tf.sin(x[i] * w))
    return made.stack()


def _autograph(x, w):
    total = tf.zeros_like(x)
    for i in tf.range(3):
        if i > 0:
            total += tf.sin(x * w)
        else:
            total += x
    return total


def _recomputed_loop(x, w):
    return hvp.recompute(lambda x: _loop(x, w))(x)


def _recomputed_branch(x, w):
    return hvp.recompute(
        lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: tf.sin(x * w), lambda: tf.cos(x))
    )(x)
