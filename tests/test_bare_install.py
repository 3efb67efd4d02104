"""What is optional is optional: everything works with TensorFlow, NumPy and scipy alone."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
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
    for inverse in (hvp.ExactInverse(H), hvp.NeumannInverse(H), hvp.ArnoldiInverse(H, rank=1)):
        inverse @ np.ones(3)
    hvp.NystromPreconditioner(H), hvp.DiagonalPreconditioner(H)
assert hvp.minimize(quartic, w).success
assert hvp.NewtonCG(quartic, w).minimize().success
hvp.linearize(quartic, w).vjp(tf.ones([]))
numbers = np.arange(6.0)
mean = tf.Variable(numbers.mean())
square = lambda x: tf.reduce_mean((x - mean) ** 2)
influence = hvp.InfluenceFunctions(square, mean, (numbers,))
assert influence.scores((numbers[:2],)).shape == (2, 6)
assert influence.self_influence().shape == (6,)
hvp.HessianOperator(square, mean, (numbers,), batch_size=2) @ np.ones(1)
try:
    hvp.solve(H.refresh() or H, np.ones(3), progress=True)
except hvp.HvpError as error:
    print("asked for a bar:", error)
"""


def test_everything_works_with_the_required_packages_alone(tmp_path):
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text("\n".join([*blocks, EVERYTHING]))
    command = [sys.executable, str(ROOT / "tests" / "bare.py"), str(script)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "asked for a bar: A progress bar was requested, but tqdm is not installed" in run.stdout
    assert "pip install tqdm" in run.stdout
