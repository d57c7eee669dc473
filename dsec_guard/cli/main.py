"""`dsec-guard`: the group of commands. Each command's module is imported only when that command runs."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

try:
    import click
except ModuleNotFoundError:
    print("dsec-guard: the guard's own dependencies are not installed\n"
          "  next: pip install 'dsec-guard[guard]' (Python 3.11 or later); dsec_guard.client works without", file=sys.stderr)
    raise SystemExit(125) from None

# Looking for plugins of pydantic's costs 5 ms, and nobody's plugin is to run in a privileged process.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

import dsec_guard
from dsec_guard.cli.options import EXIT_GUARD_ERROR, EXIT_INTERRUPTED, report_error
from dsec_guard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: name -> (module, what `--help` says); the module has a click command of that name.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("dsec_guard.cli.run", "Run a command in a box, watch it, and judge what it did."),
    "incidents": ("dsec_guard.cli.incidents", "List and show recorded incidents."),
    "apply": ("dsec_guard.cli.apply", "Write packed changes of a run to its workspace."),
    "judge": ("dsec_guard.cli.judge", "Judge a recording again, under the same or another policy."),
    "policy": ("dsec_guard.cli.policy", "Check and explain policies."),
    "doctor": ("dsec_guard.cli.doctor", "Show which layers work on this host, and how to enable the rest."),
    "corpus": ("dsec_guard.cli.corpus", "Run a directory of known behaviours and compare what was found."),
}


class LazyGroup(click.Group):
    """A group that knows its commands' names without importing them, and never uses an exit status of 1 or 2: those
    may be the guarded command's own."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None,
             complete_var: str | None = None, standalone_mode: bool = True, **extra: Any) -> Any:
        try:
            result = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.Abort:
            if not standalone_mode:
                raise
            sys.exit(EXIT_INTERRUPTED)
        except click.ClickException as err:
            if not standalone_mode:
                raise
            path = err.ctx.command_path if isinstance(err, click.UsageError) and err.ctx else "dsec-guard"
            report_error(UsageError(err.format_message(), hint=f"{path} --help"))
            sys.exit(EXIT_GUARD_ERROR)
        if not standalone_mode:
            return result
        sys.exit(result if isinstance(result, int) else 0)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(dsec_guard.__version__, prog_name="dsec-guard")
def cli() -> None:
    """A hardened sandbox for LLM agents: it binds them, notices what they try, and judges it.

    Exit status 125 means that dsec-guard itself failed.
    """


if __name__ == "__main__":
    cli()
