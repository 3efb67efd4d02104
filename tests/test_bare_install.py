"""Everything works with TensorFlow, NumPy and scipy alone and one thread for graphs.

So does the code of the README and of "Getting started".
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
# After the blocks of the README.
OF_THE_README = """
assert info == 0
assert solutions.shape == (161, 8)
assert np.isfinite(result.fun)
assert harmful.shape == (10, 3)
"""
# After those of "Getting started".
OF_GETTING_STARTED = """
assert info == 0
assert largest > 0
assert dense.shape == (161, 161)
assert flat.shape == (161,) and len(restored) == 4
assert H.stats.engine == "graph"
assert result.gradient_evaluations == len(result.history)
assert solutions.shape == (161, 8)
assert len(eigenvalues) == 5
assert J.shape == (200, 161)
assert F.is_positive_semidefinite and kernels.shape == (144, 144)
assert density.size == 161
assert report.ok
assert len(history["curvature_largest"]) == 3
assert second.shape == layer.kernel.shape
"""
# Everything that can show progress, without; and what it says when a bar is asked for.
EVERYTHING = """
import warnings
warnings.simplefilter("error", hvp.ConvergenceWarning)
for name in ("tqdm", "matplotlib", "sklearn", "hypothesis", "pytest"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(f"{name} can be imported")

w = tf.Variable([1.0, 2.0, 3.0])
quartic = lambda: tf.reduce_sum(w**4) / 12 + tf.reduce_sum(w**2)
with hvp.HessianOperator(quartic, w, progress=False) as H:
    assert hvp.check(H).ok
    assert hvp.solve(H, np.ones((3, 2)), method="cg").converged.all()
    for inverse in (hvp.ExactInverse(H), hvp.NeumannInverse(H)):
        inverse @ np.ones(3)
    hvp.NystromPreconditioner(H), hvp.DiagonalPreconditioner(H)
    assert hvp.trace(H).estimate == 20.0
    assert np.allclose(hvp.eigsh(H, 3).eigenvalues, [11, 6, 3])
    assert np.allclose(hvp.diagonal(H).estimate, [3, 6, 11])
    hvp.norm(H), hvp.logdet(H, rtol=0.5), hvp.quadratic_forms(H, np.ones(3), np.exp)
    try:
        hvp.spectral_density(H).plot()
    except hvp.HvpError as error:
        print("asked for a figure:", error)
assert hvp.minimize(quartic, w).success
assert hvp.NewtonCG(quartic, w).minimize().success
hvp.linearize(quartic, w).vjp(tf.ones([]))
numbers = np.arange(6.0)
mean = tf.Variable(numbers.mean())
square = lambda x: tf.reduce_mean((x - mean) ** 2)
influence = hvp.InfluenceFunctions(square, mean, (numbers,))
assert influence.scores((numbers[:2],)).shape == (2, 6)
assert influence.self_influence().shape == (6,)
batches = hvp.HessianOperator(square, mean, (numbers,), batch_size=2)
batches @ np.ones(1)
# TensorFlow has one thread for the operations of graphs, as on a machine with one core.
for python in (batches, hvp.HessianOperator(quartic, w, engine="tape")):
    assert hvp.solve(python, np.ones(len(python.gradient)), method="cg").converged
    assert hvp.NewtonCG(python).minimize().success
try:
    hvp.solve(H.refresh() or H, np.ones(3), progress=True)
except hvp.HvpError as error:
    print("asked for a bar:", error)
"""


def test_the_documented_code_and_everything_else_works_with_the_required_packages_alone(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    page = (ROOT / "docs" / "getting_started.rst").read_text()
    found = re.findall(r".. code-block:: python\n\n((?:   .*\n|\n)*)", page)
    started = [textwrap.dedent(block) for block in found]
    assert (len(blocks), len(started)) == (3, 14)
    script = tmp_path / "script.py"
    parts = [*blocks, OF_THE_README, *started, OF_GETTING_STARTED, EVERYTHING]
    script.write_text("\n".join(parts))
    command = [sys.executable, str(ROOT / "tests" / "bare.py"), str(script)]
    one_thread = {**os.environ, "TF_NUM_INTEROP_THREADS": "1"}
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=300, env=one_thread
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.startswith("1 gradient for")
    assert "HessianOperator of size 161, float32: " in run.stdout
    assert "asked for a bar: A progress bar was requested, but tqdm is not installed" in run.stdout
    assert "pip install tqdm" in run.stdout
    assert "asked for a figure: A figure was requested, but matplotlib is not" in run.stdout
