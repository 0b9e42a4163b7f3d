"""What a user sees when her input cannot be used.

Owns: the error types that mean "the input is wrong, not the program", their one-screen text, and
the exit codes of all commands. Owns no check; checks live where a value enters.
"""

from collections.abc import Sequence
from typing import Final

EXIT_FAILED: Final = 1
"""A check failed."""
EXIT_WRONG_INPUT: Final = 2
EXIT_POLICY: Final = 3
"""Stopped by a policy of the user's: bad numbers, a spike, a target that is missed."""
EXIT_DOES_NOT_FIT: Final = 4
EXIT_BROKEN: Final = 5
"""A promise is broken."""
EXIT_FAULT_OF_OURS: Final = 70
EXIT_PREEMPTED: Final = 75
"""Saved, because somebody wants the machine back; the run goes on elsewhere or later."""
EXIT_PEER_LOST: Final = 76
"""Another process of the run is gone."""
EXIT_HUNG: Final = 124
EXIT_INTERRUPTED: Final = 130
"""Saved, because of Ctrl-C."""


class UserError(Exception):
    """The user's input cannot be used: where it stands, its value, what is allowed, one cure."""

    exit_code: int = EXIT_WRONG_INPUT

    def __init__(
        self,
        message: str,
        *,
        where: str = "",
        value: str = "",
        allowed: str = "",
        cure: str = "",
        also: "tuple[UserError, ...]" = (),
    ) -> None:
        """Describe the fault.

        Args:
            message: What is wrong, in one line.
            where: The key, file or object, e.g. `mesh.tensor`.
            value: The value that was given.
            allowed: What would have been accepted.
            cure: One thing to do about it.
            also: Further faults of the same input, so that one run shows them all.
        """
        super().__init__(message, where, value, allowed, cure, also)
        self.message = message
        self.where = where
        self.value = value
        self.allowed = allowed
        self.cure = cure
        self.also = also

    def __str__(self) -> str:
        """Return the message for the screen."""
        lines = [f"{self.where}: {self.message}" if self.where else self.message]
        labels = (("value", self.value), ("allowed", self.allowed), ("to do", self.cure))
        lines += [f"  {label}: {text}" for label, text in labels if text]
        return "\n".join(lines + [str(other) for other in self.also])

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the keyword arguments, so that worker processes can raise it."""
        return _rebuild, (type(self), *self.args[:-1], self.also)


class ConfigError(UserError):
    """A config file, a flag or a combination of settings is wrong."""


class ShardingError(UserError):
    """A mesh, a rule or a placement is impossible."""


class PolicyError(UserError):
    """The run was stopped, as the user has asked for: bad numbers, a spike, a silent fault."""

    exit_code = EXIT_POLICY


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or does not fit this run."""


class DataError(UserError):
    """A data file is missing, empty, damaged or of another kind."""


def raise_all(faults: Sequence[UserError]) -> None:
    """Raise the first of several faults, with the others in its message.

    Args:
        faults: What is wrong; nothing happens when there is none.

    Raises:
        UserError: The first fault.
    """
    if faults:
        first, *others = faults
        first.also = tuple(others)
        raise first


def unreadable(path: object, error: OSError | ValueError) -> ConfigError:
    """Return what is said of a file that the user named and that cannot be read.

    Args:
        path: The file.
        error: What reading it has raised.
    """
    if isinstance(error, FileNotFoundError):
        return ConfigError(
            "there is no such file",
            where=str(path),
            cure="check the path; relative paths start at the current folder",
        )
    if isinstance(error, OSError):
        return ConfigError(f"cannot be read: {error.strerror or error}", where=str(path))
    text = isinstance(error, UnicodeDecodeError)
    return ConfigError(f"cannot be read: {'no text in UTF-8' if text else error}", where=str(path))


def unwritable(where: str, path: object, error: OSError) -> ConfigError:
    """Return what is said of what the user asked for and cannot be written.

    Args:
        where: The flag or key that named it.
        path: The file or folder.
        error: What writing it has raised.
    """
    return ConfigError(
        f"cannot be written: {error.strerror or error}",
        where=where,
        value=str(path),
        cure="give a path in a folder that is there and that you may write in",
    )


def _rebuild(
    kind: type[UserError],
    message: str,
    where: str,
    value: str,
    allowed: str,
    cure: str,
    also: tuple[UserError, ...],
) -> UserError:
    return kind(message, where=where, value=value, allowed=allowed, cure=cure, also=also)


class PeerEndError(Exception):
    """Another process of this run has ended it, and has said why."""

    def __init__(self, exit_code: int, words: str) -> None:
        """Take over the end.

        Args:
            exit_code: What this process exits with.
            words: Why, as the other process has put it.
        """
        super().__init__(words)
        self.exit_code = exit_code
