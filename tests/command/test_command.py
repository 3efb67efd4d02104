"""The command, on a model and data in files."""

import json
import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvp._command.command import main
from tests.cases import Problem, dense_hessian, random, relative_error

layers = keras.layers
X, Y = random(0, 60, 4), random(1, 60, 2)


def make(compiled=True):
    model = keras.Sequential(
        [layers.Input((4,)), layers.Dense(6, "tanh", name="inner"), layers.Dense(2, name="last")]
    )
    for index, weight in enumerate(model.trainable_variables):
        weight.assign(random(index, *weight.shape, scale=0.5))
    if compiled:
        model.compile("sgd", "mse")
    return model


@pytest.fixture
def files(tmp_path):
    model = make()
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    return model, tmp_path, [str(tmp_path / "model.keras"), str(tmp_path / "data.npz")]


def dense(model):
    twin = keras.Sequential(
        [
            layers.Input((4,), dtype="float64"),
            layers.Dense(6, "tanh", dtype="float64"),
            layers.Dense(2, dtype="float64"),
        ]
    )
    twin.set_weights(model.get_weights())
    variables = [v.value for v in twin.trainable_variables]
    x, y = X.astype("float64"), Y.astype("float64")

    def loss():
        return tf.reduce_mean((twin(x) - y) ** 2)

    return dense_hessian(Problem(loss, variables)), float(loss())


@pytest.mark.parametrize("options", [[], ["--batch-size", "25"]])
@pytest.mark.few(1)
def test_everything_is_right(files, options, capsys):
    model, folder, arguments = files
    out, figure = folder / "out.json", folder / "out.png"
    pytest.importorskip("matplotlib")
    more = ["--json", str(out), "--figure", str(figure), "--rtol", "0.05", *options]
    assert main([*arguments, *more]) == 0
    H, value = dense(model)
    eigenvalues = np.linalg.eigvalsh(H)
    found = json.loads(out.read_text())
    assert found["value"] == pytest.approx(value, rel=1e-5)
    largest = [row["eigenvalue"] for row in found["largest_eigenvalues"]]
    assert relative_error(largest, eigenvalues[::-1][:5]) < 1e-5
    assert found["smallest_eigenvalue"]["eigenvalue"] == pytest.approx(eigenvalues[0], abs=1e-4)
    error = abs(found["trace"]["estimate"] - eigenvalues.sum())
    assert error < 5 * found["trace"]["standard_error"] + 1e-6 * np.abs(eigenvalues).sum()
    assert [row["size"] for row in found["layers"].values()] == [30, 14]
    assert found["check"]["symmetry"][0] == "ok"
    assert np.sum(found["density"]["weights"]) == pytest.approx(8)
    text = capsys.readouterr().out
    assert "check               passed" in text
    assert f"{largest[0]:.6g}" in text
    assert "last" in text
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_small_model_that_was_not_trained(tmp_path, capsys):
    """All of its eigenvalues are separate, and the state of its optimizer does not matter."""
    model = keras.Sequential([layers.Input((4,)), layers.Dense(2)])
    model.compile("rmsprop", "mse")
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    out = tmp_path / "out.json"
    files = [str(tmp_path / "model.keras"), str(tmp_path / "data.npz")]
    assert main([*files, "--json", str(out)]) == 0
    text = out.read_text()
    assert "NaN" not in text
    assert json.loads(text)["density"]["bulk"] == [None, None]
    assert "no bulk" in capsys.readouterr().out


def test_gauss_newton_and_a_part_of_the_data(files, capsys):
    _, folder, arguments = files
    out = folder / "out.json"
    options = ["--matrix", "gauss-newton", "--examples", "20", "--no-density", "--no-check"]
    assert main([*arguments, *options, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["smallest_eigenvalue"]["eigenvalue"] > -1e-4
    assert "density" not in found
    assert "check" not in found
    assert "20 examples" in capsys.readouterr().out


def test_a_new_process(files):
    """As a user runs it, in another folder."""
    _, folder, arguments = files
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-W", "ignore", "-m", "hvp"]
    options = ["--no-density", "--no-check"]
    ended = subprocess.run(
        [*command, *arguments, *options],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr
    assert re.match(r"Hessian of \S+, 44 variables, 60 examples of .*, inference", ended.stdout)
    assert "largest eigenvalues" in ended.stdout


CUSTOM = """
import keras

@keras.saving.register_keras_serializable("mine")
class Twice(keras.layers.Layer):
    def call(self, x):
        return 2 * x
"""


@pytest.mark.few(0)
def test_custom_objects(files, monkeypatch, capsys):
    _, folder, arguments = files
    (folder / "mine_for_test.py").write_text(CUSTOM)
    script = (
        "import keras, mine_for_test\n"
        "m = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), mine_for_test.Twice()])\n"
        "m.compile('sgd', 'mse')\nm.save('custom.keras')\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], cwd=folder, check=True)
    arguments[0] = str(folder / "custom.keras")
    options = ["--no-density", "--no-check"]
    assert main([*arguments, *options]) == 2
    assert "--import MODULE" in capsys.readouterr().err
    monkeypatch.syspath_prepend(str(folder))
    assert main([*arguments, *options, "--import", "mine_for_test"]) == 0
    assert main([*arguments, *options, "--import", "no_such_module"]) == 2
    assert "no_such_module cannot be imported" in capsys.readouterr().err


BATCHES = """
import numpy as np
import tensorflow as tf

def data():
    rng = np.random.default_rng(0)
    whole = rng.normal(size=(60, 4)), rng.normal(size=(60, 2))
    return tf.data.Dataset.from_tensor_slices(whole).batch(25)
"""


def results(arguments, folder):
    out = folder / "found.json"
    assert main([*arguments, "--no-density", "--no-check", "--json", str(out)]) == 0
    return json.loads(out.read_text())


def test_batches_in_a_folder_and_from_a_script(files):
    model, folder, (saved, _) = files
    (folder / "batches.py").write_text(BATCHES)
    space = {}
    exec(BATCHES, space)
    batches = space["data"]()
    batches.save(str(folder / "batches"))
    (x, y) = next(iter(batches.unbatch().batch(60)))
    value = float(tf.reduce_mean((model(x) - tf.cast(y, tf.float32)) ** 2))
    for data in ("batches", "batches.py"):
        found = results([saved, str(folder / data)], folder)
        assert found["value"] == pytest.approx(value, rel=1e-5)
        assert found["subject"]["examples"] is None


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.few(1)
def test_several_inputs_and_outputs(named, tmp_path, capsys):
    one, other = layers.Input((4,), name="one"), layers.Input((2,), name="other")
    hidden = layers.Dense(3, "tanh")(layers.Concatenate()([one, other]))
    left, right = layers.Dense(1, name="left")(hidden), layers.Dense(2, name="right")(hidden)
    if named:
        model = keras.Model({"one": one, "other": other}, {"left": left, "right": right})
        model.compile("sgd", {"left": "mse", "right": "mae"})
        keys = "x/one", "x/other", "y/left", "y/right"
    else:
        model = keras.Model([one, other], [left, right])
        model.compile("sgd", ["mse", "mae"])
        keys = "x/0", "x/1", "y/0", "y/1"
    model.save(tmp_path / "model.keras")
    parts = [random(i, 60, size) for i, size in enumerate((4, 2, 1, 2))]
    np.savez(tmp_path / "data.npz", **dict(zip(keys, parts)))
    arguments = [str(tmp_path / "model.keras"), str(tmp_path / "data.npz")]
    first, second = tf.nest.flatten(
        model([*parts[:2]] if not named else dict(zip(("one", "other"), parts)))
    )
    expected = np.mean((first - parts[2]) ** 2) + np.mean(np.abs(second - parts[3]))
    found = results(arguments, tmp_path)
    assert found["value"] == pytest.approx(float(expected), rel=1e-5)
    assert found["subject"]["examples"] == 60
    assert results([*arguments, "--examples", "7"], tmp_path)["subject"]["examples"] == 7
    # Another name, or a single array.
    for wrong in ({keys[0]: parts[0], "x/tother": parts[1]}, {"x": parts[0]}):
        np.savez(tmp_path / "wrong.npz", **wrong, **dict(zip(keys[2:], parts[2:])))
        assert main([arguments[0], str(tmp_path / "wrong.npz")]) == 2
        said = capsys.readouterr().err.replace("\n", " ")
        assert f"{keys[0]} of shape (None, 4), {keys[1]} of shape (None, 2)" in said


def test_nested_inputs_come_from_a_file_of_python(tmp_path):
    first, second = layers.Input((3,)), layers.Input((2,))
    third = layers.Input((2,), name="b")
    joined = layers.Concatenate()([first, second, third])
    try:
        model = keras.Model({"a": [first, second], "b": third}, layers.Dense(1)(joined))
    except ValueError:
        pytest.skip("this version of Keras has no nested inputs")
    model.compile("sgd", "mse")
    model.save(tmp_path / "model.keras")
    text = """
import numpy as np

def data():
    parts = [np.random.default_rng(i).normal(size=(6, size)) for i, size in enumerate([3, 2, 2, 1])]
    return {"a": parts[:2], "b": parts[2]}, parts[3]
"""
    (tmp_path / "data.py").write_text(text)
    arguments = [str(tmp_path / "model.keras"), str(tmp_path / "data.py")]
    space = {}
    exec(text, space)
    expected = model.evaluate(*space["data"](), verbose=0)
    assert results(arguments, tmp_path)["value"] == pytest.approx(expected, rel=1e-5)


def test_a_page(files):
    """It shows every number, and asks for nothing from anywhere."""
    pytest.importorskip("matplotlib")
    _, folder, arguments = files
    out, page = folder / "found.json", folder / "page.html"
    assert main([*arguments, "--html", str(page), "--json", str(out), "--no-check"]) == 0
    text, found = page.read_text("utf-8"), json.loads(out.read_text())
    for row in [*found["largest_eigenvalues"], found["smallest_eigenvalue"]]:
        assert f"{row['eigenvalue']:.6g}" in text
    for name, row in found["layers"].items():
        assert f"<td>{name}</td>" in text
        assert f"{row['estimate']:.5g}" in text
    assert "<svg" in text
    links = re.findall(r"(?:src|href)=.(?!#)[^ ]*", text)
    assert not [link for link in links if "xlink" not in link]


def test_what_is_wrong_is_said(files, capsys):
    _, folder, arguments = files
    make(compiled=False).save(folder / "plain.keras")
    (folder / "broken.keras").write_text("no model")
    (folder / "broken.npz").write_text("no data")
    (folder / "zipped.npz").write_bytes(b"PK\x03\x04 no data")
    np.save(folder / "single.npy", X)
    np.savez(folder / "words.npz", x=X, y=np.array(["a"] * len(X)))
    np.savez(folder / "empty.npz", x=X[:0], y=Y[:0])
    np.savez(folder / "targets.npz", x=X, y=Y[:, :1, np.newaxis] * np.ones((1, 3, 5)))
    (folder / "saved").mkdir()
    (folder / "nothing.py").write_text("x = 1")
    (folder / "batches.py").write_text(BATCHES)
    two = [layers.Input((2,)), layers.Input((2,))]
    sums = keras.Model(two, layers.Dense(1)(layers.Add()(two)))
    sums.compile("sgd", "mse")
    sums.save(folder / "two.keras")
    aimless = make(compiled=False)
    aimless.compile("sgd")
    aimless.save(folder / "aimless.keras")
    np.savez(folder / "named.npz", inputs=X, targets=Y)
    np.savez(folder / "uneven.npz", x=X, y=Y[:3])
    np.savez(folder / "unfit.npz", x=X[:, :3], y=Y)
    model, data = arguments
    for changed, said in (
        ([str(folder / "none.keras"), data], "no file"),
        ([str(folder / "plain.keras"), data], "not compiled.*model.compile"),
        ([str(folder / "broken.keras"), data], "cannot be loaded"),
        ([model, str(folder / "none.npz")], "no file"),
        ([model, str(folder / "broken.npz")], "not an .npz file"),
        ([model, str(folder / "zipped.npz")], "not an .npz file"),
        ([model, str(folder / "single.npy")], "single array without a name"),
        ([model, str(folder / "words.npz")], "array y.*<U1.*integers"),
        ([model, str(folder / "empty.npz")], "no examples"),
        ([model, str(folder / "targets.npz")], r"loss does not accept y of shape \(60, 3, 5\)"),
        (
            [str(folder / "two.keras"), data],
            r"x of shape \(60, 4\).*x/0 of shape \(None, 2\), x/1 of shape \(None, 2\)",
        ),
        ([model, str(folder / "saved")], "saved is no data set.*dataset.save"),
        ([model, str(folder / "nothing.py")], "no function data"),
        ([model, str(folder / "batches.py"), "--examples", "5"], "dataset.take"),
        ([str(folder / "aimless.keras"), data], "without a loss"),
        ([str(folder / "saved"), data], "is a folder"),
        ([model, data, "--figure", str(folder / "out.xyz")], "format is unknown.*[.]png"),
        ([model, data, "--json", str(folder)], "is a folder"),
        ([model, data, "--import", "mine.py"], "--import mine, without .py"),
        ([model, str(folder / "named.npz")], "arrays inputs, targets.*np.savez"),
        ([model, str(folder / "uneven.npz")], r"x \(60, 4\), y \(3, 2\)"),
        ([model, str(folder / "unfit.npz")], r"accept x of shape \(60, 3\).*\(None, 4\)"),
        ([model, data, "--json", str(folder / "none" / "out.json")], "no folder"),
    ):
        assert main(changed) == 2, said
        error = capsys.readouterr().err.replace("\n", " ")
        assert re.search(said, error), error
    for option, value in (
        ("--eigenvalues", "0"),
        ("--rtol", "-1"),
        ("--examples", "-1"),
        ("--seed", "x"),
        ("--max-products", "1.5"),
    ):
        with pytest.raises(SystemExit):
            main([model, data, f"{option}={value}"])
        assert f"{value} is not a" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "example:" in capsys.readouterr().out


def test_training_mode_arrays_beside_and_labels_that_are_out_of_range(tmp_path, capsys):
    model = keras.Sequential(
        [layers.Input((4,)), layers.BatchNormalization(), layers.Dense(3, name="last")]
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.save(tmp_path / "model.keras")
    labels = np.arange(60) % 3
    np.savez(tmp_path / "data.npz", x=X, y=labels, class_weight=np.ones(3))
    arguments = [str(tmp_path / "model.keras"), str(tmp_path / "data.npz")]
    more = ["--no-density", "--no-check", "--json", str(tmp_path / "out.json")]
    again = tmp_path / "again.json"
    for path in (arguments[1], str(again)):
        assert main([*arguments, *more[:-1], path, "--figure", str(again)]) == 2
        printed = capsys.readouterr().err
        assert "used twice" in printed if path == str(again) else "data.npz" in printed
    assert np.load(tmp_path / "data.npz")["x"].shape == X.shape
    values = {}
    for mode in ("inference", "training"):
        assert main([*arguments, *more, *(["--training"] if mode == "training" else [])]) == 0
        printed = capsys.readouterr()
        assert f"{mode} mode" in printed.out
        assert "not used: class_weight" in printed.err
        results = json.loads((tmp_path / "out.json").read_text())
        assert results["subject"]["mode"] == mode
        assert results["subject"]["examples"] == 60
        logits = model(X, training=mode == "training")
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        assert results["value"] == pytest.approx(float(tf.reduce_mean(loss)), rel=1e-5)
        values[mode] = results["value"]
    assert values["training"] != values["inference"]
    np.savez(tmp_path / "data.npz", x=X, y=1 + labels)
    assert main([*arguments, *more]) == 2
    assert "label value of 3 which is outside the valid range" in capsys.readouterr().err


def test_random_layers_draw_the_same_numbers_each_time(files, tmp_path):
    model = keras.Sequential([layers.Input((4,)), layers.Dense(8), layers.Dropout(0.5)])
    model.add(layers.Dense(Y.shape[1]))
    model.compile("sgd", "mse")
    model.save(tmp_path / "dropout.keras")
    arguments = [str(tmp_path / "dropout.keras"), files[2][1], "--training"]
    losses = [results([*arguments, "--seed", seed], tmp_path)["value"] for seed in "001"]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
