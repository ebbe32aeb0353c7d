"""Peak FLOPs by device name, and FLOPs per token."""

import pytest

from torchtitan_clone.observe.flops import peak_flops_per_second, training_flops_per_token


@pytest.mark.parametrize(
    ("device_name", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA B100", 1750.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI325X", 1307.4),
    ],
)
def test_known_devices(device_name, tflops):
    assert peak_flops_per_second(device_name, dtype="bfloat16") == tflops * 1e12


@pytest.mark.parametrize(
    "device_name",
    [
        "cpu",
        "NVIDIA A10G",
        "NVIDIA A1000",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ],
)
def test_unknown_devices_have_no_peak(device_name):
    assert peak_flops_per_second(device_name, dtype="bfloat16") is None


def test_unknown_data_types_have_no_peak():
    assert peak_flops_per_second("NVIDIA H100 80GB HBM3", dtype="float32") is None


def test_flops_of_llama_3_8b():
    """6 x 7.504e9 in matrix products; attention over 8,192 tokens: 12 x 32 x 32 x 128 x 8,192 = 12.9e9."""
    flops = training_flops_per_token(
        matmul_parameters=7_504_924_672, n_heads=32, head_dim=128, attended_tokens=[8192] * 32
    )
    assert flops == 45_029_548_032 + 12_884_901_888
