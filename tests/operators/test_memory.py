"""Memory stays flat over many products, and close() gives the residuals back."""

import sys

import pytest

from tests import memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.few(0)
def test_five_thousand_products_leave_memory_flat():
    measured = memory.run(
        """
        x = tf.constant(np.random.default_rng(0).standard_normal((16, 8)), tf.float32)
        w, u = tf.Variable(tf.ones((8, 8))), tf.Variable(tf.ones((8, 1)))
        H = hvp.HessianOperator(lambda: tf.reduce_mean((tf.tanh(x @ w) @ u) ** 2), [w, u])
        v = np.ones(72, "float32")
        for _ in range(500):
            H @ v
        start = resident_megabytes()
        for _ in range(4500):
            H @ v
        print("products", H.stats.products)
        print("growth", resident_megabytes() - start)
        """
    )
    assert measured["products"] == 5_000
    assert measured["growth"] < 5


def test_close_gives_the_residuals_back_and_they_are_as_large_as_reported():
    measured = memory.run(
        """
        x = tf.ones((2**16, 128))
        def build():
            # 4 layers of tanh on 32 MiB each: blocks so large go back to the system when freed.
            w = tf.Variable(np.eye(128, dtype="float32") * 0.5)
            def loss():
                h = x
                for _ in range(4):
                    h = tf.tanh(h @ w)
                return tf.reduce_mean(h)
            return hvp.HessianOperator(loss, w)
        build().close()  # TensorFlow allocates buffers and starts threads of its own once
        start = resident_megabytes()
        H = build()
        print("residuals", resident_megabytes() - start)
        print("reported", H.stats.residual_bytes / 2**20)
        H.close()
        print("left", resident_megabytes() - start)
        """,
        # oneDNN's allocator keeps freed memory for TensorFlow's next tensors.
        TF_ENABLE_ONEDNN_OPTS="0",
    )
    assert measured["residuals"] > 100
    assert measured["left"] < 0.1 * measured["residuals"]
    # `residual_bytes` is an upper bound: TensorFlow frees values no derivative needs.
    assert 0.9 * measured["residuals"] < measured["reported"] < 2 * measured["residuals"]


@pytest.mark.few(0)
def test_a_product_takes_three_values_a_layer_unless_told_otherwise():
    measured = memory.run(
        """
        w = [tf.Variable(np.eye(64, dtype="float32") * 0.9) for _ in range(14)]
        x = tf.ones((2**16, 64))  # 16 MiB
        def loss():
            h = x
            for weights in w:
                h = tf.tanh(h @ weights)
            return tf.reduce_mean(h**2)
        v = [tf.ones_like(weights) for weights in w]
        start = begin_peak()
        H = hvp.HessianOperator(loss, w)
        H.product(v)
        print("values", (megabytes("VmHWM") - start) / 16)
        print("residuals", H.stats.residual_bytes / 2**24)
        """,
        # oneDNN's allocator keeps what is freed, and so does malloc unless told.
        TF_ENABLE_ONEDNN_OPTS="0",
        MALLOC_MMAP_THRESHOLD_="1048576",
    )
    assert measured["residuals"] == pytest.approx(2 * 14 - 1, rel=0.02)
    # A layer's value, its cotangent and its tangent, and the two groups of four on the way.
    assert measured["values"] < 3 * 14 + 8 + 4
