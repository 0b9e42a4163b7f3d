"""What a user sees when her input cannot be used.

Owns: the error types that mean "the input is wrong, not the program" and their one-screen text.
Does not own: exit codes of anything else, and no check; checks live where a value enters.
"""

from collections.abc import Sequence


class UserError(Exception):
    """The user's input cannot be used: where it stands, its value, what is allowed, one cure."""

    exit_code = 2

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
