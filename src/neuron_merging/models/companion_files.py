"""Find the files that belong to a network of transformers beside its weights: tokenizer, processor, generation config,
and what sentence-transformers reads.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from neuron_merging.errors import MergingError
from neuron_merging.graph.user_code import import_module_or_raise
from neuron_merging.inputs.text import find_gguf, load_tokenizer
from neuron_merging.models.pretrained_config import CONFIG_FILE, is_transformers_model
from neuron_merging.progress import log

COMPANION_PATTERNS = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.spm",
    "*.tiktoken",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece*.model",
    "chat_template.*",
    "*processor_config.json",
    "generation_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
)
"""Names of the files that are copied. Weights and code are not among them."""
MODULES_FILE = "modules.json"
"""The list of modules of sentence-transformers; each but the network itself has a folder of its own."""
MODULE_SUFFIXES = (".json", ".txt", ".safetensors")
"""Files of such a module that are copied. Pickles are not."""


def find_companion_files(network: nn.Module) -> dict[str, Path]:
    """Return the files to copy, by their name in the new folder; empty for a network that no folder is known of."""
    source = _find_source_folder(network)
    if source is None:
        return {}
    files = {file.name: file for file in sorted(source.iterdir()) if _is_companion(file)}
    for folder in _list_module_folders(source):
        for file in sorted(folder.iterdir()):
            if file.is_file() and file.suffix in MODULE_SUFFIXES:
                files[f"{folder.name}/{file.name}"] = file
            else:
                log.warning("%s is not copied: such files may contain code", file)
    return files


def render_gguf_tokenizer(network: nn.Module) -> dict[str, bytes]:
    """Return the files of the tokenizer that a .gguf file holds beside the weights; empty for any other network."""
    place = str(getattr(network.config, "name_or_path", "") or "") if is_transformers_model(network) else ""
    if not place or not find_gguf(place)[1]:
        return {}
    try:
        tokenizer = load_tokenizer(place)
    except MergingError:
        return {}
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir()) if _is_companion(file)}


def _is_companion(file: Path) -> bool:
    return file.is_file() and any(fnmatchcase(file.name, pattern) for pattern in COMPANION_PATTERNS)


def _find_source_folder(network: nn.Module) -> Path | None:
    """Return the folder that the network was loaded from, which may be the cache of the hub; None if there is none."""
    if not is_transformers_model(network):
        return None
    name = str(getattr(network.config, "name_or_path", "") or "")
    # transformers keeps here what `from_pretrained` was given: a folder, or a name on the hub.
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        hub = import_module_or_raise("huggingface_hub", "pip install 'neuron-merging[zoo]'.")
        cached = hub.try_to_load_from_cache(name, CONFIG_FILE)
    except Exception:  # noqa: BLE001 (a name that the hub does not accept)
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _list_module_folders(source: Path) -> list[Path]:
    """Return the folders that modules.json names, one level below the source."""
    try:
        entries = json.loads((source / MODULES_FILE).read_bytes())
        names = [str(entry.get("path", "")) for entry in entries]
    except (OSError, ValueError, AttributeError, TypeError):
        return []
    known = {folder.name: folder for folder in source.iterdir() if folder.is_dir()}
    return [known[name] for name in names if name in known]
