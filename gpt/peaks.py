"""Peak rates of matrix products by device: what a model's FLOPs are compared with.

Dense figures (the makers like to print twice that, for matrices of which half is zero), products
summed in float32 as in training (half the rate on GeForce cards). `torch.float32` is true float32,
not TF32. A figure is the maker's, at the boost clock of the maker's own card: one that clocks
higher can pass it. What is not here is unknown: `runtime.peak_flops` takes it from the user.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

ANY = (0.0, float("inf"))


@dataclass(frozen=True, slots=True)
class Card:
    """TFLOP/s of one device as torch sees it, whose name, after the maker's, is all of `name`.

    `units`: multiprocessors that the driver reports, which tells a slice or a special edition from
    the card of the data sheet. Where one name stands for several cards, `watts` (power limit) or
    `gigabytes` (2^30 bytes of memory) say which one this is.
    """

    name: str
    units: int | None
    float32: float | None
    half: float | None
    source: str
    bfloat16: bool = True  # at the rate of float16
    watts: tuple[float, float] = ANY
    gigabytes: tuple[float, float] = ANY


PASCAL = "Tesla P100 data sheet, specifications"
VOLTA = "Tesla V100 data sheet, specifications (V100 PCIe, V100 SXM2, V100S PCIe)"
T4 = "T4 data sheet, specifications"
TURING = "Turing GPU architecture whitepaper, tables 1 and 4-6: reference cards"
TURING_CLOCKS = "Turing GPU architecture whitepaper, rate per SM; SMs and clock of the card's page"
QUADRO = "Quadro RTX data sheets, single precision and Tensor performance"
A100 = "A100 data sheet, specifications without sparsity"
AMPERE = "data sheets of A2, A10, A30 and A40, specifications without sparsity"
A10G = "A10G data sheet, specifications without sparsity"
GA102 = "Ampere GA102 whitepaper v2, comparison tables: FP16 Tensor, FP32 accumulate"
GA102_CLOCKS = "Ampere GA102 whitepaper v2, rate per SM; SMs and clock of the card's page"
RTX_A = "RTX A-series data sheets, Tensor performance halved (printed with sparsity)"
HOPPER = "H100 data sheet, halved (printed with sparsity)"
H200 = "H200 data sheet, halved (printed with sparsity)"
GH200 = "GH200 Grace Hopper data sheet, halved (printed with sparsity)"
H20 = "H20 data sheet, specifications without sparsity"
ADA = "Ada GPU architecture whitepaper, appendix A: FP16 Tensor, FP32 accumulate"
ADA_CLOCKS = "Ada GPU architecture whitepaper, rate per SM; SMs and clock of the card's page"
ADA_SERVER = "data sheets of L4, L40 and L40S, specifications without sparsity"
# Their 16-bit rate isn't printed, and the L40 shows that the chip alone doesn't tell it.
ADA_RTX = "RTX Ada Generation data sheets, single precision only"
BLACKWELL = "Blackwell architecture data sheet, halved (printed with sparsity), for one GPU"
BLACKWELL_RTX = "RTX Blackwell whitepaper, appendix A: FP16 Tensor, FP32 accumulate"
BLACKWELL_CLOCKS = "RTX Blackwell whitepaper, rate per SM; SMs and clock of the card's page"
BLACKWELL_PRO = "RTX PRO Blackwell whitepaper: FP16 Tensor, FP32 accumulate"
MI200 = "Instinct MI200 series data sheets, matrix rates; a device is one of a module's two dies"
MI210 = "Instinct MI210 data sheet, matrix rates"
MI300 = "Instinct MI300 series data sheets, matrix rates without sparsity"
MI350 = "Instinct MI350 series data sheets, matrix rates without sparsity"

CARDS = [
    # Server cards
    Card("P100-SXM2-16GB", 56, 10.6, None, PASCAL, bfloat16=False),
    Card("P100-PCIE-1[26]GB", 56, 9.3, None, PASCAL, bfloat16=False),
    Card("V100-SXM2-(16|32)GB", 80, 15.7, 125, VOLTA, bfloat16=False),
    Card("V100-PCIE-(16|32)GB", 80, 14, 112, VOLTA, bfloat16=False),
    Card("V100S-PCIE-32GB", 80, 16.4, 130, VOLTA, bfloat16=False),
    Card("T4", 40, 8.1, 65, T4, bfloat16=False),
    Card("A[18]00-(SXM4?|PCIE)-[48]0GB|A[18]00 80GB PCIe", 108, 19.5, 312, A100),
    Card("A30", 56, 10.3, 165, AMPERE),
    Card("A40", 84, 37.4, 149.7, AMPERE),
    Card("A10", 72, 31.2, 125, AMPERE),
    Card("A10G", 80, 35, 70, A10G),
    Card("A2", 10, 4.5, 18, AMPERE),
    Card("L4", 58, 30.3, 121, ADA_SERVER),
    Card("L40", 142, 90.5, 181.05, ADA_SERVER),
    Card("L40S", 142, 91.6, 362.05, ADA_SERVER),
    Card("H100 80GB HBM3", 132, 67, 989.5, HOPPER),
    Card("H100 PCIe", 114, 51, 756.5, HOPPER),
    Card("H100 NVL", 132, 60, 835.5, HOPPER),
    Card("H20", 78, 44, 148, H20),
    Card("H200", 132, 67, 989.5, H200),
    Card("H200 NVL", 132, 60, 835.5, H200),
    Card("GH200 (120|480)GB|GH200 144G HBM3e", 132, 67, 990, GH200),
    Card("B200", 148, 75, 2250, BLACKWELL),
    Card("GB200", None, 80, 2500, BLACKWELL),
    Card("B300 SXM6 AC", None, 75, 2250, BLACKWELL),
    # GeForce RTX 20. A laptop's 2060, 2070 and 2080 have the same names and a lower power limit.
    Card("RTX 2060", 30, 6.5, 25.8, TURING_CLOCKS, False, (150, 200), (5, 7)),
    Card("RTX 2060", 34, 7.2, 28.7, TURING_CLOCKS, False, (150, 220), (11, 13)),
    Card("RTX 2060 SUPER", 34, 7.2, 28.7, TURING_CLOCKS, bfloat16=False),
    Card("RTX 2070", 36, 7.5, 29.9, TURING, False, watts=(165, 230)),
    Card("RTX 2070 SUPER", 40, 9.1, 36.2, TURING_CLOCKS, False, watts=(190, 270)),
    Card("RTX 2080", 46, 10, 40.3, TURING, False, watts=(205, 280)),
    Card("RTX 2080 SUPER", 48, 11.2, 44.6, TURING_CLOCKS, False, watts=(230, 320)),
    Card("RTX 2080 Ti", 68, 13.4, 53.8, TURING, bfloat16=False),
    Card("TITAN RTX", 72, 16.3, 130.5, TURING, bfloat16=False),
    # The passively cooled edition has the same name, 250 W, and nine tenths of the rate.
    Card("Quadro RTX [68]000", 72, 16.3, 130.5, QUADRO, False, watts=(255, 300)),
    Card("Quadro RTX 5000", 48, 11.2, 89.2, QUADRO, False, watts=(200, 270)),
    Card("Quadro RTX 4000", 36, 7.1, 57, QUADRO, False, watts=(125, 165)),
    # GeForce RTX 30
    Card("RTX 3060", 28, 12.7, 25.5, GA102_CLOCKS),
    Card("RTX 3060 Ti", 38, 16.2, 32.4, GA102_CLOCKS),
    Card("RTX 3070", 46, 20.3, 40.6, GA102),
    Card("RTX 3070 Ti", 48, 21.7, 43.5, GA102_CLOCKS),
    Card("RTX 3080", 68, 29.8, 59.5, GA102, gigabytes=(9, 11)),
    Card("RTX 3080", 70, 30.6, 61.3, GA102_CLOCKS, gigabytes=(11, 13)),
    Card("RTX 3080 Ti", 80, 34.1, 68.2, GA102_CLOCKS),
    Card("RTX 3090", 82, 35.6, 71, GA102),
    Card("RTX 3090 Ti", 84, 40, 80, ADA),
    # GeForce RTX 40
    Card("RTX 4060", 24, 15.1, 30.2, ADA_CLOCKS),
    Card("RTX 4060 Ti", 34, 22.1, 44.1, ADA_CLOCKS),
    Card("RTX 4070", 46, 29.1, 58.3, ADA_CLOCKS),
    Card("RTX 4070 SUPER", 56, 35.5, 71, ADA_CLOCKS),
    Card("RTX 4070 Ti", 60, 40.1, 80.2, ADA_CLOCKS),
    Card("RTX 4070 Ti SUPER", 66, 44.1, 88.2, ADA_CLOCKS),
    Card("RTX 4080", 76, 48.7, 97.5, ADA),
    Card("RTX 4080 SUPER", 80, 52.2, 104.4, ADA_CLOCKS),
    Card("RTX 4090", 128, 82.6, 165.2, ADA),
    Card("RTX 4090 D", 114, 73.5, 147.1, ADA_CLOCKS),
    # GeForce RTX 50
    Card("RTX 5060 Ti", 36, 23.7, 47.4, BLACKWELL_CLOCKS),
    Card("RTX 5070", 48, 30.9, 61.7, BLACKWELL_RTX),
    Card("RTX 5070 Ti", 70, 43.9, 87.9, BLACKWELL_RTX),
    Card("RTX 5080", 84, 56.3, 112.6, BLACKWELL_RTX),
    Card("RTX 5090", 170, 104.8, 209.5, BLACKWELL_RTX),
    # Workstation cards
    Card("RTX A2000( 12GB)?", 26, 8, 31.9, RTX_A),
    Card("RTX A4000", 48, 19.2, 76.7, RTX_A),
    Card("RTX A4500", 56, 23.7, 94.6, RTX_A),
    Card("RTX A5000", 64, 27.8, 111.1, RTX_A),
    Card("RTX A5500", 80, 34.1, 136.4, RTX_A),
    Card("RTX A6000", 84, 38.7, 154.8, RTX_A),
    Card("RTX 4000 Ada Generation", 48, 26.7, None, ADA_RTX),
    Card("RTX 4500 Ada Generation", 60, 39.6, None, ADA_RTX),
    Card("RTX 5000 Ada Generation", 100, 65.3, None, ADA_RTX),
    Card("RTX 6000 Ada Generation", 142, 91.1, None, ADA_RTX),
    Card("RTX PRO 6000 Blackwell Workstation Edition", 188, 126, 503.8, BLACKWELL_PRO),
    # AMD
    Card("MI210", 104, 45.3, 181, MI210),
    Card("MI250", 104, 45.3, 181, MI200),
    Card("MI250X", 110, 47.9, 191.5, MI200),
    Card("MI300A", 228, 122.6, 980.6, MI300),
    Card("MI300X", 304, 163.4, 1307.4, MI300),
    Card("MI325X", 304, 163.4, 1307.4, MI300),
    Card("MI350X", 256, 144.2, 2300, MI350),
    Card("MI355X", 256, 157.3, 2500, MI350),
]


def lookup(
    name: str,
    dtype: torch.dtype,
    power_watts: float | None = None,
    memory_gb: float | None = None,
    units: int | None = None,
) -> float | None:
    """FLOP/s of the device whose driver calls it `name`, or None where the table can't tell.

    power_watts: its power limit; memory_gb: in units of 2^30 bytes; units: multiprocessors. What is
    None is not known: a card that needs it to be told from another is then unknown too.
    """
    name = re.sub(r"^(NVIDIA|AMD) ", "", name.strip())
    name = re.sub(r"^(GeForce|Tesla|Instinct) ", "", name)
    rates = {
        getattr(card, "half" if dtype != torch.float32 else "float32")
        for card in CARDS
        if re.fullmatch(card.name, name, re.IGNORECASE)
        and (dtype in (torch.float32, torch.float16) or (dtype == torch.bfloat16 and card.bfloat16))
        and _within(power_watts, card.watts)
        and _within(memory_gb, card.gigabytes)
        and (units is None or card.units is None or units == card.units)
    }
    if len(rates) != 1:
        return None
    (rate,) = rates
    return None if rate is None else rate * 1e12


def _within(value: float | None, limits: tuple[float, float]) -> bool:
    return limits == ANY or (value is not None and limits[0] <= value <= limits[1])
