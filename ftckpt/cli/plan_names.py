"""Models and clusters that ``ftckpt plan`` knows by name."""

from __future__ import annotations

from typing import NamedTuple

from ftckpt.units import size

# Name, parameters, of these in routed experts, layers, hidden size; source.
_MODELS = """
llama3-8b      8.03e9   0        32   4096   arXiv 2407.21783, table 3
llama3-70b     70.6e9   0        80   8192   arXiv 2407.21783, table 3
llama3-405b    405.9e9  0        126  16384  arXiv 2407.21783, table 3
gpt3-175b      175e9    0        96   12288  arXiv 2005.14165, table 2.1
megatron-1t    1008e9   0        128  25600  arXiv 2104.04473, table 1
mixtral-8x7b   46.7e9   45.1e9   32   4096   arXiv 2401.04088, table 1
deepseek-v3    671e9    653.9e9  61   7168   arXiv 2412.19437, section 4.2
"""

# Name, GPUs of a node, its host memory, its network links, their Gbit/s; source.
_CLUSTERS = """
dgx-a100       8  2TB      8   200  NVIDIA DGX A100 data sheet, 640 GB system
dgx-h100       8  2TB      8   400  NVIDIA DGX H100 data sheet
frontier       8  512GB    4   200  OLCF, Frontier user guide: a node has 8 graphics compute dies
p4d.24xlarge   8  1152GiB  4   100  AWS, EC2 P4 instances
p5.48xlarge    8  2048GiB  32  100  AWS, EC2 P5 instances
a3-highgpu-8g  8  1872GB   5   200  Google Cloud, accelerator-optimized machines
nd-h100-v5     8  1900GiB  8   400  Azure, ND H100 v5 sizes
"""


class KnownModel(NamedTuple):
    """A model; ``expert_params``: how many of its parameters are in routed experts."""

    params: float
    expert_params: float
    layers: int
    hidden: int


class KnownCluster(NamedTuple):
    """The nodes of a cluster. An SMP uses one of the ``links``."""

    gpus: int
    node_bytes: int
    links: int
    link_gbits: float


MODELS = {
    name: KnownModel(float(params), float(experts), int(layers), int(hidden))
    for name, params, experts, layers, hidden, *_ in map(str.split, _MODELS.strip().splitlines())
}
CLUSTERS = {
    name: KnownCluster(int(gpus), size(memory), int(links), float(gbits))
    for name, gpus, memory, links, gbits, *_ in map(str.split, _CLUSTERS.strip().splitlines())
}
