"""What `zerojax.progress` shows of long work: as much as there is, where it is asked, and never more than that."""

import io
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from rich.console import Console
from rich.errors import LiveError

import zerojax
from zerojax import display, zero_shard
from zerojax.checkpoint import Checkpointer, export, import_params

PARAMS = {"w": jnp.linspace(-1, 1, 256 * 120).reshape(256, 120), "b": jnp.ones(3)}


def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2) + params["b"].sum()


@pytest.fixture(scope="module")
def tx():
    return zero_shard(optax.sgd(1e-2), stage=3, mesh=mesh_of(8))


def console(**options):
    return Console(file=io.StringIO(), width=100, **options)


def whole_life(tx, path):
    """A run from published weights to a restored state."""
    export(PARAMS, path / "published")
    state = tx.create(import_params(path / "published", PARAMS))
    state, _ = tx.train_step(loss)(state, jnp.ones((8, 256)))
    with Checkpointer(path / "run") as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        restored = checkpoints.restore(state).state
    tx.eval_step(loss)(restored.params, jnp.ones((8, 256)))
    tx.value_and_grad(loss)(restored.params, jnp.ones((8, 256)))
    return state, tx.reshard(restored, to=zero_shard(optax.sgd(1e-2), stage=1, mesh=mesh_of(2)))


@pytest.fixture
def ended(monkeypatch):
    """The share that each task came to, by description."""
    shares, end = {}, display.Display.end

    def recorded(self, task, *, failed):
        [one] = [one for one in self._bars.tasks if one.id == task]
        shares[one.description] = one.total and one.completed / one.total
        end(self, task, failed=failed)

    monkeypatch.setattr(display.Display, "end", recorded)
    return shares


def test_every_long_work_is_shown_to_its_end(tx, tmp_path, ended):
    shown = console()
    with zerojax.progress(shown):
        state, restored = whole_life(tx, tmp_path)
    for name, x in zerojax.logical(state.params).items():
        np.testing.assert_array_equal(zerojax.logical(restored.params)[name], x)
    measured = ended.pop("Writing step 1")  # from time to time, and this save is quicker
    assert 0 <= measured <= 1.5
    assert ended == {
        f"Exporting to {tmp_path / 'published'}": 1,
        f"Importing {tmp_path / 'published'}": 1,
        "Compiling the step with loss": None,
        "Copying step 1 to host memory": None,
        "Digesting step 1": 1,
        "Verifying step 1": 1,
        "Restoring step 1": 1,
        "Compiling to evaluate loss": None,
        "Compiling to differentiate loss": None,
        "Resharding the state": 1,
    }
    lines = shown.file.getvalue().splitlines()
    assert len(lines) >= len(ended) + 1
    assert all(any(line.startswith(f"{name}: took ") for line in lines) for name in ended)


def test_a_terminal_has_bars_that_disappear(capsys):
    shown = console(force_terminal=True)
    with zerojax.progress(shown), display.tracking("Copying", 4):
        display.advance(1)
        print("a line of the program")
        zerojax.display._DISPLAYS[-1]._bars.refresh()
    assert "Copying" in shown.file.getvalue()
    assert "25%" in shown.file.getvalue()
    assert "took" not in shown.file.getvalue()
    assert capsys.readouterr().out == "a line of the program\n"  # and not on the console


def test_nothing_is_shown_unasked(capsys):
    assert not sys.stderr.isatty()
    with zerojax.progress(), display.tracking("Copying", 4):
        display.advance(1)
    with display.tracking("Copying", 4):
        display.advance(1)
    found = capsys.readouterr()
    assert found.out + found.err == ""


def test_only_the_first_process_shows(monkeypatch):
    shown = console()
    with zerojax.progress(shown):
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        with display.tracking("Copying", 4):
            display.advance(1)
    assert shown.file.getvalue() == ""


def test_an_error_is_passed_on_and_said():
    shown = console()
    with pytest.raises(KeyError), zerojax.progress(shown), display.tracking("Copying"):
        raise KeyError("x")
    assert shown.file.getvalue().startswith("Copying: failed after ")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_console_that_is_closed_harms_no_work(is_terminal):
    shown = console(force_terminal=is_terminal)
    with zerojax.progress(shown):
        shown.file.close()
        with display.tracking("Copying", 4):
            display.advance(1)
        with display.tracking("Measuring", 4, measure=lambda: 4):
            pass


def test_a_console_that_shows_other_bars_harms_no_work(monkeypatch):
    def busy(*_):  # as rich does up to version 14.0
        raise LiveError("Only one live display may be active at once")

    shown = console(force_terminal=True)
    monkeypatch.setattr(shown, "set_live", busy)
    with zerojax.progress(shown), display.tracking("Copying", 4):
        display.advance(1)


def test_what_goes_on_after_the_block_is_not_shown():
    shown = console()
    work = display.tracking("Copying", 4)
    with zerojax.progress(shown):
        work.__enter__()
    display.advance(4)
    work.__exit__(None, None, None)
    assert shown.file.getvalue() == ""


def test_a_folder_is_measured_while_it_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(display, "MEASURED_EVERY_S", 0.01)
    shown = console()
    with zerojax.progress(shown), display.tracking("Writing", 1 << 20, measure=lambda: display.bytes_in(tmp_path)):
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "file").write_bytes(bytes(range(256)) * 2048)
        [task] = display._DISPLAYS[-1]._bars.tasks
        while task.completed < 1 << 19:  # ends by the test's time limit otherwise
            pass
    assert display.bytes_in(tmp_path / "folder") >= 1 << 19
