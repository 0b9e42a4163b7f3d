"""What can be asked of the `plan` command; imported before jax is.

Owns: the options, their defaults and help. Does not own: the config that is planned.
"""

from dataclasses import dataclass
from typing import Final, Literal

USUAL: Final = "h100:1x8"
"""The cluster that is planned for where none is named."""


@dataclass(frozen=True)
class PlanOptions:
    """How a config is planned, and how the plan is told."""

    target: str = ""
    """The cluster: CHIP:HOSTSxCHIPS, such as h100:64x8; docs/hardware.md lists the chips. "" =
    h100:1x8."""
    search: bool = True
    """Whether to look at all other layouts too; `--no_search` = only at the config's own, which
    must be legal on the target then."""
    top: int = 10
    """Layouts to print."""
    objective: Literal["time", "memory", "cost"] = "time"
    """What makes a layout better; cost also looks at fewer hosts, and needs a price."""
    price: float = 0.0
    """Of one device for an hour, in any currency. 0 = that of the chip's row, if it has one."""
    explain: str = ""
    """Another layout to explain besides the config's, as changes to it: "tensor=4, zero=3"."""
    sweep: str = ""
    """Sizes to compare: "batch_size=256,512,1024" or "sequence_length=2048,4096"."""
    out: str = ""
    """A config to write with the best layout in it."""
    picture: str = ""
    """A picture to write (.svg, .png): memory, time by part, and one step."""
    chips: str = ""
    """A TOML file with chips of your own."""
    compile: bool = False
    """Compile the run's own step for the target, which need not be here (extra `plan`)."""
    audit: bool = False
    """Compile, and check the program against what the layout promises; exit 5 if one is broken."""
    keep: str = ""
    """A folder for the compiled program, its collectives, its memory and the plan, for a diff with
    those of another; with --compile or --audit."""
    seconds: float = 900.0
    """Time limit of the compiler."""
    json: bool = False
    """Print JSON and nothing else."""

    @property
    def cluster(self) -> str:
        """The cluster that is planned for."""
        return self.target or USUAL
