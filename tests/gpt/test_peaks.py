"""The table of peak rates: names that look alike, figures against units × clock × rate a clock."""

import re

import pytest
import torch

from gpt.peaks import CARDS, lookup

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H20", 148),
        ("NVIDIA GH200 480GB", 990),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("A100-SXM4-40GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA A2", 18),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 3090 Ti", 80),
        ("NVIDIA GeForce RTX 4070", 58.3),
        ("NVIDIA GeForce RTX 4070 Ti", 80.2),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", 147.1),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX A4000", 76.7),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI250X", 191.5),
    ],
)
def test_bfloat16_of_names_that_look_alike(name: str, tflops: float) -> None:
    """Neither a part of the name nor the sparse figure is taken for the card's."""
    assert lookup(name, BF16) == pytest.approx(tflops * 1e12)
    assert lookup(name, FP16) == lookup(name, BF16)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3080 Laptop GPU",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce GTX 1080 Ti",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A100-SXM-64GB",
        "GRID A100-40C",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA H100",
        "RTX",
        "",
    ],
)
def test_what_the_table_does_not_hold_is_unknown(name: str) -> None:
    assert lookup(name, BF16) is None


def test_workstation_cards_of_one_number() -> None:
    assert lookup("NVIDIA RTX A6000", FP32) == 38.7e12
    assert lookup("NVIDIA RTX 6000 Ada Generation", FP32) == 91.1e12
    assert lookup("Quadro RTX 6000", FP32, power_watts=260) == 16.3e12
    assert lookup("Quadro RTX 6000", FP32, power_watts=250) is None
    assert lookup("Quadro RTX 6000", FP32) is None


def test_v100_by_board_and_without_bfloat16() -> None:
    assert lookup("Tesla V100-SXM2-32GB", FP16) == 125e12
    assert lookup("Tesla V100-PCIE-16GB", FP16) == 112e12
    assert lookup("Tesla V100S-PCIE-32GB", FP16) == 130e12
    assert lookup("Tesla T4", FP16) == 65e12
    for name in ("Tesla V100-SXM2-32GB", "Tesla T4", "NVIDIA TITAN RTX", "Tesla P100-PCIE-16GB"):
        assert lookup(name, BF16) is None


def test_power_tells_a_desktop_card_from_a_laptop_of_the_same_name() -> None:
    assert lookup("NVIDIA GeForce RTX 2080", FP16, power_watts=215) == 40.3e12
    assert lookup("NVIDIA GeForce RTX 2080", FP16, power_watts=150) is None
    assert lookup("NVIDIA GeForce RTX 2080", FP16) is None


def test_memory_tells_two_cards_of_one_name() -> None:
    assert lookup("NVIDIA GeForce RTX 3080", BF16, memory_gb=9.8) == 59.5e12
    assert lookup("NVIDIA GeForce RTX 3080", BF16, memory_gb=11.8) == 61.3e12
    assert lookup("NVIDIA GeForce RTX 3080", BF16) is None


def test_another_number_of_multiprocessors_is_another_device() -> None:
    """A partitioned MI300X keeps its name; so may an edition made for one customer."""
    assert lookup("AMD Instinct MI300X", BF16, units=304) == 1307.4e12
    assert lookup("AMD Instinct MI300X", BF16, units=38) is None


def test_a_dtype_without_a_figure_is_unknown() -> None:
    assert lookup("NVIDIA H200", torch.float64) is None
    assert lookup("NVIDIA H200", torch.float8_e4m3fn) is None


# Dense operations a clock and multiprocessor, products of 16 bits summed in 32, by the makers'
# architecture papers; and the boost clock of the card's page in MHz.
RATES = {
    1024: {  # Volta, Turing TITAN and Quadro, CDNA 2; workstation and server cards since Ampere
        **{"V100-SXM2-16GB": 1530, "V100-PCIE-16GB": 1380, "V100S-PCIE-32GB": 1597, "T4": 1590},
        **{"TITAN RTX": 1770, "Quadro RTX 6000": 1770, "Quadro RTX 5000": 1815},
        **{"Quadro RTX 4000": 1545, "A40": 1740, "A10": 1695, "A2": 1770, "RTX A2000": 1200},
        **{"RTX A4000": 1560, "RTX A4500": 1650, "RTX A5000": 1695, "RTX A5500": 1665},
        **{"RTX A6000": 1800, "L4": 2040, "L40S": 2520, "MI210": 1700, "MI250": 1700},
        **{"MI250X": 1700, "RTX PRO 6000 Blackwell Workstation Edition": 2617},
    },
    512: {  # GeForce cards, and two server cards with the same limit
        **{"RTX 2060": 1680, "RTX 2060 SUPER": 1650, "RTX 2070": 1620, "RTX 2070 SUPER": 1770},
        **{"RTX 2080": 1710, "RTX 2080 SUPER": 1815, "RTX 2080 Ti": 1545, "RTX 3060": 1777},
        **{"RTX 3060 Ti": 1665, "RTX 3070": 1725, "RTX 3070 Ti": 1770, "RTX 3080": 1710},
        **{"RTX 3080 Ti": 1665, "RTX 3090": 1695, "RTX 3090 Ti": 1860, "RTX 4060": 2460},
        **{"RTX 4060 Ti": 2535, "RTX 4070": 2475, "RTX 4070 SUPER": 2475, "RTX 4070 Ti": 2610},
        **{"RTX 4070 Ti SUPER": 2610, "RTX 4080": 2505, "RTX 4080 SUPER": 2550},
        **{"RTX 4090": 2520, "RTX 4090 D": 2520, "RTX 5060 Ti": 2572, "RTX 5070": 2512},
        **{"RTX 5070 Ti": 2452, "RTX 5080": 2617, "RTX 5090": 2407, "A10G": 1710, "L40": 2490},
    },
    2048: {  # GA100, CDNA 3
        **{"A100-SXM4-40GB": 1410, "A100 80GB PCIe": 1410, "A30": 1440},
        **{"MI300X": 2100, "MI325X": 2100, "MI300A": 2100},
    },
    4096: {
        "H100 80GB HBM3": 1830,
        "H100 PCIe": 1620,
        "MI350X": 2200,
        "MI355X": 2400,
    },  # GH100, CDNA 4
    8192: {"B200": 1850},
}


@pytest.mark.parametrize(
    ("name", "megahertz", "rate"),
    [(name, mhz, rate) for rate, clocks in RATES.items() for name, mhz in clocks.items()],
)
def test_a_figure_is_units_times_clock_times_rate(name: str, megahertz: int, rate: int) -> None:
    """Judges each figure without its source: a sparse one would be twice this."""
    cards = [card for card in CARDS if re.fullmatch(card.name, name)]
    assert cards
    for card in cards:
        assert card.units is not None and card.half is not None
        assert card.half == pytest.approx(card.units * rate * megahertz * 1e-6, rel=0.02)


def test_float32_against_tensor_figures() -> None:
    """Where both are the same units' work, the ratio of the architecture papers holds."""
    for card in CARDS:
        if re.match(r"RTX [345]0[6789]0", card.name):
            assert card.half is not None and card.float32 is not None
            assert card.half / card.float32 == pytest.approx(2, rel=0.01)
        if re.match(r"(RTX 20|TITAN|Quadro|V100|T4)", card.name):
            assert card.half is not None and card.float32 is not None
            geforce = card.name.startswith("RTX 20")
            assert card.half / card.float32 == pytest.approx(4 if geforce else 8, rel=0.02)


def test_every_card_has_a_source_and_there_are_many() -> None:
    assert len({card.name for card in CARDS}) > 40
    assert all(card.source and card.units != 0 for card in CARDS)
