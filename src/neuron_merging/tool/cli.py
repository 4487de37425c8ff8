"""cli: registers the commands and turns errors into exit codes."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from cyclopts import App, CycloptsError

import neuron_merging
from neuron_merging.errors import MergingError
from neuron_merging.tool.commands import show

COMMANDS = (
    "compress",
    "inspect",
    "sensitivity",
    "sweep",
    "verify",
    "apply",
    "export",
    "report",
    "bench",
    "demo",
    "train",
    "finetune",
    "reproduce",
)
"""Each is a function of the same name in a file of the same name in `commands`."""
EXIT_CODES = {
    "ModelError": 3,
    "FolderError": 3,
    "NothingToPrune": 4,
    "VerificationError": 5,
    "FidelityError": 6,
    "MergingError": 2,
}
"""By the class of the error; 1 is a failing disk or a bug of ours, 130 an interruption."""

app = App(
    name="neuron-merging",
    help="Make a trained network smaller, at once and without data: removed channels are merged into those that stay.",
    help_epilogue="Exit codes: 0 done, 2 usage, 3 model not loaded or captured, 4 nothing to prune, "
    "5 verification failed, 6 not as good as required, 130 interrupted.",
    version=neuron_merging.__version__,
    suppress_keyboard_interrupt=False,
)
for place, name in enumerate(COMMANDS):
    app.command(getattr(import_module(f"neuron_merging.tool.commands.{name}"), name), name=name, sort_key=place)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code says how it went (see docs/errors.md)."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.disable()  # torch logs tracebacks of attempts that are allowed to fail
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        return 0
    except CycloptsError as error:
        return _fail(str(error), 2)
    except MergingError as error:
        codes = (EXIT_CODES.get(kind.__name__) for kind in type(error).__mro__)
        return _fail(str(error), next(code for code in codes if code))
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(f"{error.strerror or error}" + (f" (at {error.filename})" if error.filename else ""), 1)
    finally:
        logging.disable(logging.NOTSET)


def _fail(message: str, code: int) -> int:
    show.error(message)
    return code
