"""What an adapter is: a PEFT directory in, validated factors for the base's sites out.

It knows the formats of PEFT and safetensors and the sites of a base model; it knows no device, no
Redis and no network.
"""

from __future__ import annotations

from lorafleet.adapters.adapter import LoraAdapter, SiteFactors, load_adapter
from lorafleet.adapters.affine import Affine, BaseWeights
from lorafleet.adapters.config import LoraConfig, read_config
from lorafleet.adapters.files import CONFIG_FILE, WEIGHTS_FILE, scan_directory
from lorafleet.adapters.place import MAX_RANK, AdaptedModule

__all__ = [
    "CONFIG_FILE",
    "MAX_RANK",
    "WEIGHTS_FILE",
    "AdaptedModule",
    "Affine",
    "BaseWeights",
    "LoraAdapter",
    "LoraConfig",
    "SiteFactors",
    "load_adapter",
    "read_config",
    "scan_directory",
]
