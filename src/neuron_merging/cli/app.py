"""Register the commands, and turn errors into exit codes."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from cyclopts import App, CycloptsError

import neuron_merging
from neuron_merging.cli import console
from neuron_merging.errors import MergingError, explain_out_of_memory
from neuron_merging.graph.user_code import keep_user_code_importable

COMMANDS = {
    "compress": "compress",
    "inspect": "inspect",
    "sensitivity": "inspect",
    "sweep": "sweep",
    "compare": "compare",
    "verify": "saved_models",
    "apply": "compress",
    "export": "saved_models",
    "report": "saved_models",
    "bench": "bench",
    "demo": "reproduce",
    "train": "train",
    "finetune": "train",
    "reproduce": "reproduce",
}
"""Commands in the order of `--help`, with the module of `cli` that defines a function of that name."""
EXIT_CODES = {
    "ModelError": 3,
    "FolderError": 3,
    "NothingToPrune": 4,
    "VerificationError": 5,
    "FidelityError": 6,
    "MergingError": 2,
}
"""Exit codes by error class. Besides these: 1 for a failing disk or a bug in this package, 130 for an interruption."""

app = App(
    name="neuron-merging",
    help="Make a trained network smaller, without data or retraining: removed channels are merged into kept ones.",
    help_epilogue="Exit codes: 0 done, 2 usage, 3 model not loaded or captured, 4 nothing to prune, "
    "5 verification failed, 6 fidelity below --require, 130 interrupted.",
    version=neuron_merging.__version__,
    suppress_keyboard_interrupt=False,
)
for position, (name, module) in enumerate(COMMANDS.items()):
    # Imported at once and cheap: no module of the commands imports torch at its top.
    app.command(getattr(import_module(f"neuron_merging.cli.{module}"), name), name=name, sort_key=position)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code (see docs/errors.md)."""
    # Warnings of torch and of libraries say nothing to whoever runs a command; python -W shows them all the same.
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    # Both are None if the caller closed them (>&-).
    sys.stdout, sys.stderr = sys.stdout or open(os.devnull, "w"), sys.stderr or open(os.devnull, "w")
    logging.disable()  # torch logs tracebacks of failed captures, which are retried
    try:
        with keep_user_code_importable(), explain_out_of_memory():
            app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        return 0
    except CycloptsError as error:
        return _report_failure(str(error), 2)
    except MergingError as error:
        # The first class in the MRO that has a code: subclasses share the code of their base.
        codes = (EXIT_CODES.get(kind.__name__) for kind in type(error).__mro__)
        return _report_failure(str(error), next(code for code in codes if code))
    except KeyboardInterrupt:
        return _report_failure("interrupted", 130)
    except BrokenPipeError:
        # The reader of a pipe (head, less) has closed it. Point stdout elsewhere, or Python's flush at exit fails.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _report_failure(f"{error.strerror or error}" + (f" (at {error.filename})" if error.filename else ""), 1)
    finally:
        logging.disable(logging.NOTSET)


def _report_failure(message: str, code: int) -> int:
    console.print_error(message)
    return code
