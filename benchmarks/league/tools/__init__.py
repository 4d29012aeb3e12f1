"""The tools, what each is installed from, and what it cannot be asked."""

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One estimator; its script takes a row as JSON and prints gib, seconds and means, or cannot."""

    name: str
    """As the table calls it."""
    script: Path
    """What asks it."""
    packages: tuple[str, ...] = ()
    """What pip installs for it, at fixed versions; empty: it comes with tonnage's own environment."""
    repository: tuple[str, str] | None = None
    """What is cloned for it, and the commit, where there is no package."""
    methods: tuple[str, ...] = ("full", "lora")
    """What it can be asked for."""
    otherwise: str = ""
    """Why not for the others."""


TOOLS = (
    Tool(name="tonnage", script=FOLDER / "ask_tonnage.py"),
    Tool(name="MemTracker", script=FOLDER / "ask_memtracker.py"),
    Tool(
        name="accelerate",
        script=FOLDER / "ask_accelerate.py",
        methods=("full",),
        otherwise="estimate-memory knows full training with Adam only",
    ),
    Tool(
        name="DeepSpeed",
        script=FOLDER / "ask_deepspeed.py",
        packages=("deepspeed==0.19.8", "hjson", "py-cpuinfo", "ninja", "msgpack", "einops"),
        methods=("full",),
        otherwise="the estimators know full training in fp16 with Adam only",
    ),
    Tool(name="fitcheck-llm", script=FOLDER / "ask_fitcheck.py", packages=("fitcheck-llm==0.3.1",)),
    Tool(
        name="llm-analysis",
        script=FOLDER / "ask_llm_analysis.py",
        packages=("llm-analysis==0.2.2", "fire==0.5.0", "termcolor", "six"),
        methods=("full",),
        otherwise="no adapters",
    ),
    Tool(
        name="SimuMax",
        script=FOLDER / "ask_simumax.py",
        repository=("https://github.com/MooreThreads/SimuMax", "4dcaae513ba7679d56c116a17cd4a691ec41e252"),
        packages=("tabulate", "pandas==3.1.1", "pytz", "python-dateutil", "tzdata", "six"),
        methods=("full",),
        otherwise="Megatron's recipe only, no adapters",
    ),
)
