"""The colours of methods can be told apart, also by those who see fewer of them, and from their background."""

import itertools

import numpy as np
import pytest

from sipp.report.palette import FREE_COLOURS, FREE_STYLES, STYLES, style_of

BACKGROUNDS = {"light": "#ffffff", "dark": "#161c24"}
# Full dichromacy, after Machado, Oliveira and Fernandes (2009), on linear RGB.
VISION = {
    "full": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}  # fmt: skip
LEAST_DISTANCE = 13.0  # CIE 1976: more than ten times what is just noticeable
LEAST_CONTRAST = 3.0  # what WCAG 2.1 asks for of graphics


def linear(colour: str) -> np.ndarray:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def least_distance(colours: list[str], vision: str) -> float:
    seen = [lab(VISION[vision] @ linear(colour)) for colour in colours]
    return min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))


def contrast(colour: str, background: str) -> float:
    weights = np.array([0.2126, 0.7152, 0.0722])
    low, high = sorted(float(weights @ linear(one)) + 0.05 for one in (colour, background))
    return high / low


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("scheme", BACKGROUNDS)
def test_methods_can_be_told_apart(scheme: str, vision: str) -> None:
    """Those with a row of their own, and those that get a free look."""
    free = [pair[list(BACKGROUNDS).index(scheme)] for pair in FREE_COLOURS]
    assert least_distance([*(getattr(style, scheme) for style in STYLES.values()), *free], vision) > LEAST_DISTANCE


@pytest.mark.parametrize("scheme", BACKGROUNDS)
def test_methods_stand_out(scheme: str) -> None:
    for style in (*STYLES.values(), *FREE_STYLES):
        assert contrast(getattr(style, scheme), BACKGROUNDS[scheme]) > LEAST_CONTRAST


def test_markers_and_dashes_tell_methods_apart_without_colour() -> None:
    looks = {(style.marker, style.dash) for style in (*STYLES.values(), *FREE_STYLES)}
    assert len(looks) == len(STYLES) + len(FREE_STYLES)


def test_repaired_networks_look_like_their_method_and_are_told_from_it_without_colour() -> None:
    for order in (("magnitude", "magnitude repaired"), ("magnitude repaired", "magnitude"), ("magnitude repaired",)):
        plain, repaired = STYLES["magnitude"], style_of("magnitude repaired", order)
        assert (repaired.light, repaired.dark, repaired.marker) == (plain.light, plain.dark, plain.marker)
        assert repaired.hollow and not plain.hollow and repaired.dash != plain.dash
    names = (*STYLES, *(f"{name} repaired" for name in STYLES))
    looks = [style_of(name, names) for name in names]
    assert len({(one.marker, one.dash, one.hollow) for one in looks}) == len(names)
    mine = [style_of(name, ("mine", "mine repaired", "yours")) for name in ("mine", "mine repaired", "yours")]
    assert mine[0].light == mine[1].light != mine[2].light and mine[1].hollow
