"""Asks about the card in every way scripts do, while it trains a little."""

import json
import subprocess

import torch


def _word(said: str | bytes) -> str:
    """As either version of pynvml says it."""
    return said.decode() if isinstance(said, bytes) else said


def smi(*arguments: str) -> list[str]:
    """The lines that nvidia-smi prints."""
    return subprocess.run(["nvidia-smi", *arguments], check=True, capture_output=True, text=True).stdout.splitlines()


def main() -> None:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    weights = torch.nn.Linear(4096, 4096).cuda()
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
    before = torch.cuda.mem_get_info()
    kept = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    after = torch.cuda.mem_get_info()
    weights(torch.randn(4, 4096, device="cuda")).sum().backward()
    optimizer.step()
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    name = pynvml.nvmlDeviceGetName(handle)
    properties = torch.cuda.get_device_properties(0)
    print(
        json.dumps(
            {
                "devices": torch.cuda.device_count(),
                "nvml_devices": pynvml.nvmlDeviceGetCount(),
                "name": torch.cuda.get_device_name(0),
                "nvml_name": _word(name),
                "capability": list(torch.cuda.get_device_capability(0)),
                "nvml_uuid": _word(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0))),
                "nvml_driver": _word(pynvml.nvmlSystemGetDriverVersion()),
                "sms": properties.multi_processor_count,
                "total": properties.total_memory,
                "smi": [
                    smi(),
                    smi("-L"),
                    smi("--query-gpu=name,memory.total,serial", "--format=csv,noheader", "-i", "1"),
                    smi("--query-gpu=uuid,driver_version", "--format=csv,noheader", "-i", "0"),
                    smi("--query-compute-apps=pid,used_memory", "--format=csv"),
                ],
                "mem_get_info_total": after[1],
                "mem_get_info_free": torch.cuda.mem_get_info()[0],
                "kept": kept.numel(),
                "taken": before[0] - after[0],
                "nvml_total": memory.total,
                "nvml_used": memory.used,
                "reserved": torch.cuda.max_memory_reserved(),
                "allocated": torch.cuda.max_memory_allocated(),
            }
        )
    )


if __name__ == "__main__":
    main()
