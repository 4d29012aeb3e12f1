"""The Hub's files of models that the catalog knows, where the Hub cannot be reached or does not give them.

`from_pretrained("meta-llama/Llama-3.2-1B")` works without a network and without access to a gated repository: its
configuration is the catalog's, and its tokenizer has a vocabulary of the same size and makes up the tokens.  Files
that the Hub or its local cache has are taken from there.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tonnage_recorder.imports import after_import

from . import made_up_processors, made_up_tokens

_REACH_SECONDS = 5
"""Time limit of the question whether the Hub can be reached; a download would be tried again for half a minute."""

_ENGINES = ("vllm", "sglang")
"""Packages that load weights in the format in which they are published."""

_REFUSALS = ("GatedRepoError", "RepositoryNotFoundError", "LocalEntryNotFoundError", "OfflineModeIsEnabled")
"""Errors, by name, with which the Hub withholds a repository; it calls one that may not be seen `not found`."""


class Hub:
    """Answers for the files of the catalog's models in one process.

    `catalog` is a JSON document: for each repository, in lower case, the file of its configuration and the format of
    its weights.  Inference engines load by it; transformers trains 16-bit weights.
    """

    def __init__(self, catalog: str, folder: Path) -> None:
        self._models: dict[str, dict[str, Any]] = json.loads(Path(catalog).read_text(encoding="utf-8"))
        self._folder = folder
        self._withheld: set[str] = set()
        self._answered: dict[str, set[str]] = {}
        self._reached: bool | None = None

    def install(self) -> None:
        """Patch the functions that fetch and find files, in their own modules and where transformers keeps them."""
        for name in ("huggingface_hub.file_download", "huggingface_hub._snapshot_download", "transformers.utils.hub"):
            after_import(name, self._patch)

    def assumed(self) -> list[str]:
        """Return a sentence for each repository that the catalog answered for."""
        return [
            f"the Hub did not give {repository}: its configuration is the catalog's, with weights in "
            f"{self._models[_key(repository)]['dtype']}"
            + ("; its tokenizer makes up tokens, of a vocabulary as large" if "tokenizer.json" in names else "")
            + ("; its processor takes images of the sizes published" if "preprocessor_config.json" in names else "")
            for repository, names in sorted(self._answered.items())
        ]

    def _patch(self, module: ModuleType) -> None:
        for name, answering in (
            ("hf_hub_download", self._downloading),
            ("snapshot_download", self._downloading_all),
            ("try_to_load_from_cache", self._looking_up),
        ):
            original = getattr(module, name, None)
            if original is not None and not hasattr(original, "of_tonnage"):
                patched = answering(original)
                patched.of_tonnage = True
                setattr(module, name, patched)

    def _downloading(self, original: Any) -> Any:
        """Return `hf_hub_download` that takes from the catalog what the Hub withholds."""

        @functools.wraps(original)
        def hf_hub_download(repo_id: str, filename: str, *args: Any, **kwargs: Any) -> Any:
            if not self._is_known(repo_id, kwargs):
                return original(repo_id, filename, *args, **kwargs)
            try:
                return original(repo_id, filename, *args, **{**kwargs, "local_files_only": True})
            except Exception as error:
                missing = error
            if self._can_reach():
                try:
                    return original(repo_id, filename, *args, **kwargs)
                except Exception as error:
                    if not _is_refusal(error):
                        raise
                    missing = error
            self._withheld.add(_key(repo_id))
            path = self._write(repo_id, filename)
            if path is None:
                raise missing
            return path

        return hf_hub_download

    def _downloading_all(self, original: Any) -> Any:
        """Return `snapshot_download` that gives a folder with the catalog's files for a repository as a whole.

        Callers that name files look for each of them afterwards, so that for these a refusal is only noted.
        """

        @functools.wraps(original)
        def snapshot_download(repo_id: str, *args: Any, **kwargs: Any) -> Any:
            is_known = self._is_known(repo_id, kwargs)
            if is_known:
                self._can_reach()
            try:
                return original(repo_id, *args, **kwargs)
            except Exception as error:
                if not is_known or not _is_refusal(error):
                    raise
                self._withheld.add(_key(repo_id))
                if kwargs.get("allow_patterns") is not None:
                    raise
                return self._write_all(repo_id)

        return snapshot_download

    def _looking_up(self, original: Any) -> Any:
        """Return `try_to_load_from_cache` that finds the catalog's files of what the Hub withholds."""

        @functools.wraps(original)
        def try_to_load_from_cache(repo_id: str, filename: str, *args: Any, **kwargs: Any) -> Any:
            kept = original(repo_id, filename, *args, **kwargs)
            if isinstance(kept, str) or _key(repo_id) not in self._withheld or not self._is_known(repo_id, kwargs):
                return kept
            return self._write(repo_id, filename) or kept

        return try_to_load_from_cache

    def _is_known(self, repository: str, options: Mapping[str, Any]) -> bool:
        is_model = options.get("repo_type") in (None, "model") and not options.get("subfolder")
        return is_model and _key(repository) in self._models

    def _can_reach(self) -> bool:
        """Return whether the Hub answers at all; if not, other requests fail at once from now on."""
        if self._reached is None:
            from huggingface_hub import constants
            from huggingface_hub.utils import get_session

            try:
                if constants.HF_HUB_OFFLINE:
                    raise ConnectionError
                get_session().head(constants.ENDPOINT, timeout=_REACH_SECONDS)
                self._reached = True
            except Exception:
                self._reached = False
                constants.HF_HUB_OFFLINE = True
        return self._reached

    def _makers(self, repository: str) -> dict[str, Callable[[], Any]]:
        """Return the makers of the files that stand for the Hub's, by name."""
        known = self._models[_key(repository)]
        config = json.loads(Path(known["config"]).read_text(encoding="utf-8"))
        return {
            "config.json": lambda: {**config, "torch_dtype": known["dtype"], **_quantization(known)},
            **made_up_tokens.files(config, repository),
            **made_up_processors.files(config),
        }

    def _write(self, repository: str, name: str) -> str | None:
        """Return the path of a file that stands for the Hub's; None for one that is not made."""
        makers = self._makers(repository)
        if name not in makers:
            return None
        path = self._folder / repository.replace("/", "--") / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f"{name}.{os.getpid()}")  # several ranks may write it at the same time
            draft.write_text(json.dumps(makers[name]()), encoding="utf-8")
            draft.rename(path)
        self._answered.setdefault(repository, set()).add(name)
        return str(path)

    def _write_all(self, repository: str) -> str:
        """Return the folder with all files that stand for the Hub's."""
        for name in self._makers(repository):
            self._write(repository, name)
        return str(self._folder / repository.replace("/", "--"))


def _quantization(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of a configuration that states the weights' format, for a process with an inference engine."""
    is_wanted = known["quantization"] and any(name in sys.modules for name in _ENGINES)
    return {"quantization_config": known["quantization"]} if is_wanted else {}


def _key(repository: str) -> str:
    return repository.lower().replace("_", "-")


def _is_refusal(error: BaseException) -> bool:
    """Return whether the Hub withholds the repository, or was lost meanwhile."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {*_REFUSALS, "ConnectionError", "ConnectError", "Timeout", "TimeoutException"})
