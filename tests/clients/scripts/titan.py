"""torchtitan's debug model, by its own trainer: `titan.py fsdp` or `titan.py tensor`.

torchtitan is made for GPUs and a newer torch: what it lacks here is made first. The
rest are settings, and words in the place of texts that would have to be fetched.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.nn.functional import scaled_dot_product_attention

# --- the CPU: it is the device, its memory is not counted, and attention is that with a
# mask (flex_attention has no backward there)
torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device: "cpu"
torch.cpu.get_device_properties = lambda device: SimpleNamespace(total_memory=1 << 30)
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
torch.cpu.memory_stats = lambda device: {}
torch.cpu.current_device = lambda: 0

# --- torch 2.13, which has this by another name
dist.set_timeout = dist.distributed_c10d._set_pg_timeout

from torchtitan.hf_datasets import DatasetConfig  # noqa: E402  (after the device)
from torchtitan.hf_datasets.text_datasets import DATASETS  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402


def masked(q, k, v, *, block_mask, scale, enable_gqa, **_):
    mask = create_mask(block_mask.mask_mod, len(q), 1, q.shape[2], k.shape[2], "cpu")
    how = {"attn_mask": mask, "scale": scale, "enable_gqa": enable_gqa}
    return scaled_dot_product_attention(q, k, v, **how), None


attention.FlexAttention._compiled_flex_attn = masked
attention._compiled_create_block_mask = create_block_mask

# --- words and their numbers
WORDS = [f"w{i}" for i in range(500)]
assets = Path("assets", os.environ["RANK"])
assets.mkdir(parents=True)
numbers = {word: i for i, word in enumerate(["[UNK]", "<s>", "</s>", *WORDS])}
tokenizer = Tokenizer(WordLevel(numbers, unk_token="[UNK]"))
tokenizer.pre_tokenizer = WhitespaceSplit()
tokenizer.save(str(assets / "tokenizer.json"))
ends = {"bos_token": "<s>", "eos_token": "</s>"}
(assets / "tokenizer_config.json").write_text(json.dumps(ends))
texts = [" ".join(WORDS[i * j % 500] for j in range(90)) for i in range(1, 200)]
DATASETS["words"] = DatasetConfig(
    path="words",
    loader=lambda path: Dataset.from_dict({"text": texts}),
    sample_processor=lambda sample: sample["text"],
)

# --- the settings
config = llama3_debugmodel()
config.hf_assets_path = str(assets)
config.dataloader.dataset = "words"
config.training.local_batch_size, config.training.seq_len = 2, 64
config.training.steps = 4
config.training.mixed_precision_param = "float32"
config.training.disable_cuda_graphs = True
config.checkpoint.enable = config.validator.enable = False
config.debug.seed = 0
config.parallelism.spmd_backend = "partial_dtensor"  # the default: for newer FSDPs
config.parallelism.tensor_parallel_degree = 2 if sys.argv[1] == "tensor" else 1
trainer = config.build()
for module in trainer.model_parts[0].modules():
    if isinstance(module, FSDPModule) and dist.get_backend() == "gloo":
        module.set_force_sum_reduction_for_comms(True)  # it has no premultiplied sum
log = trainer.metrics_processor.log


def tell(step: int, loss: float, *others: object, **more: object) -> None:
    if dist.get_rank() == 0:
        print("loss", loss)
    log(step, loss, *others, **more)


trainer.metrics_processor.log = tell
trainer.train()
trainer.close()
dist.destroy_process_group()
