"""Resolving a model's name to files on disk: the built-in model, a local folder or GGUF file, or a hub id.

Downloads go through `huggingface_hub`, with its cache, its token and its offline switch. Only data is fetched: never
code, never pickles. The files are read elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from quire.checkpoint.gguf.source import begins_as_gguf, is_gguf
from quire.errors import ModelError, echo, first_line, listed

DEMO_MODEL = "quire-demo"

DOWNLOAD_PATTERNS = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    # What sentence-transformers adds: which layers follow, each in a folder of its own (1_Pooling, 2_Dense), prompts.
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "[0-9]_*/config.json",
    "[0-9]_Dense/model.safetensors",
]
# Other subfolders hold other formats (onnx/, original/); consolidated files hold the same weights once more.
IGNORE_PATTERNS = ["[!0-9a]*/*", "a[!d]*/*", "ad[!d]*/*", "[0-9][!_]*/*", "*/*/*", "consolidated*"]

DEFAULT_GGUF = "Q4_K_M"  # of hub ids that name none
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(
    name_or_path: str, *, revision: str | None = None, download_dir: str | None = None, token: str | None = None
) -> Path:
    """Return the folder of a model or its GGUF file, downloading it if it is a hub id that is not in the cache.

    Args:
        name_or_path: "quire-demo", a local folder or GGUF file, or "owner/name" on the Hugging Face hub. Of a folder or
            hub id with several GGUF files, "FOLDER:Q4_K_M" takes one.
        revision: branch, tag or commit on the hub.
        download_dir: where downloads are kept; the Hugging Face cache if None.
        token: for the hub; the one that `huggingface_hub` finds if None.

    Raises:
        ModelError: it is none of these, or the hub does not give it; one line.
    """
    if name_or_path == DEMO_MODEL:
        from quire.demo import demo_model_path

        return demo_model_path()
    path = Path(name_or_path).expanduser()
    try:
        if name_or_path and path.is_dir():
            return gguf_in(path) or path
        is_file = path.is_file()
        if is_file and is_gguf(path):
            return path
        folder, _, choice = name_or_path.rpartition(":")
        if folder and Path(folder).expanduser().is_dir():
            return choose_gguf(Path(folder).expanduser(), choice)
    except OSError as error:
        raise ModelError(f"{echo(name_or_path)}: {error.strerror} (expected a model folder)") from None
    if is_file:
        hint = "; it is a GGUF file: give it a name that ends in .gguf" if begins_as_gguf(path) else ""
        raise ModelError(
            f"{name_or_path}: is a file (expected a model folder with config.json and *.safetensors, or a file whose "
            f"name ends in .gguf){hint}"
        )
    hub = {"revision": revision, "cache_dir": download_dir, "token": token}
    if choice and _HUB_ID.fullmatch(folder):
        return _download_gguf(folder, choice, hub)
    if name_or_path.upper().endswith("-GGUF") and _HUB_ID.fullmatch(name_or_path):
        return _download_gguf(name_or_path, DEFAULT_GGUF, hub)
    if not _HUB_ID.fullmatch(name_or_path) or (is_gguf(path) and "/" not in name_or_path):
        raise ModelError(
            f"{echo(name_or_path)}: no such {'file' if is_gguf(path) else 'folder'} (expected a model folder, a GGUF "
            f"file, a Hugging Face id like owner/name, or {DEMO_MODEL})"
        )
    return _download(name_or_path, DOWNLOAD_PATTERNS, IGNORE_PATTERNS, hub)


def gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file of a folder whose only weights are GGUF; None for other folders."""
    if any(path.suffix in OTHER_WEIGHTS for path in folder.iterdir()) or not any(folder.glob("*.gguf")):
        return None
    return choose_gguf(folder)


def choose_gguf(folder: Path, choice: str = "") -> Path:
    """Return the GGUF file of a folder whose name ends in `choice`, or the only one; the first part of a split file.

    Raises:
        ModelError: there is none, or there are several.
    """
    ends = re.compile(rf"(?:.*[-._])?{re.escape(choice)}(?:-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
    files = sorted(path for path in folder.rglob("*.gguf") if not _LATER_PART.search(path.name))
    found = [path for path in files if not choice or ends.fullmatch(path.name)]
    if len(found) == 1:
        return found[0]
    names = listed(echo(str(path.relative_to(folder))) for path in files)
    if not files:
        raise ModelError(f"{folder}: no GGUF files")
    if not found:
        raise ModelError(f"{folder}: no GGUF file's name ends in {echo(choice)} (there are {names})")
    raise ModelError(f"{folder}: several GGUF files: {names} (expected a file's name, or {folder}:Q4_K_M)")


def _download_gguf(repo_id: str, choice: str, hub: Mapping[str, str | None]) -> Path:
    spellings = dict.fromkeys((choice, choice.upper(), choice.lower()))
    patterns = [f"*{name}{end}" for name in spellings for end in (".gguf", "-*-of-*.gguf")]
    return choose_gguf(_download(repo_id, patterns, None, hub), choice)


def _download(repo_id: str, patterns: list[str], ignored: list[str] | None, hub: Mapping[str, str | None]) -> Path:
    """Fetch a snapshot, or find it in the cache; `hub`: revision, cache_dir and token of `snapshot_download`."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    name = f"{repo_id}@{hub['revision']}" if hub["revision"] else repo_id
    try:
        folder = huggingface_hub.snapshot_download(repo_id, allow_patterns=patterns, ignore_patterns=ignored, **hub)
    except errors.GatedRepoError:
        raise ModelError(
            f"{name}: access on the Hugging Face hub is restricted (expected a token with access; accept the model's "
            f"terms and set HF_TOKEN)"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{name}: no such revision on the Hugging Face hub") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{name}: neither a local folder nor a model on the Hugging Face hub (a private one needs HF_TOKEN)"
        ) from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        reason = "offline mode is on" if constants.HF_HUB_OFFLINE else _reason(error)
        raise ModelError(
            f"{name}: no such local folder, not in the Hugging Face cache, and the hub cannot be asked ({reason})"
        ) from None
    except errors.HFValidationError as error:
        raise ModelError(f"{name}: neither a local folder nor a valid hub id ({_reason(error)})") from None
    except errors.HfHubHTTPError as error:
        raise ModelError(f"{name}: the Hugging Face hub refused the download ({_reason(error)})") from None
    # The bases are the errors of whichever HTTP library huggingface_hub uses (a line cut in the middle of a file).
    except (OSError, *errors.HfHubHTTPError.__bases__) as error:
        raise ModelError(f"{name}: download failed ({_reason(error)})") from None
    return Path(folder)


def _reason(error: BaseException) -> str:
    """Return the first line of the error at the end of a chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
