"""Rotary positions (Su et al. 2021) and the scalings that stretch them past the trained length.

Channel i of the first half of a head and channel i of the second half form a plane, turned by position * frequency_i.
(The other common layout pairs neighbouring channels; this one is that of Hugging Face's files, so no weight needs
permuting.) Frequencies and angles are float32 whatever the model's dtype: positions above 256 are not exact in
bfloat16.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from modelworks.config import ModelConfig, RopeScaling


class RotaryPositions:
    """The angles of a model. Holds no parameters; frequencies are computed in float32 for each device once."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._frequencies: dict[torch.device, Tensor] = {}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions: int (rows, length) -> cosine and sine, each (rows, length, 1, head_dim / 2) of `dtype`."""
        scaling = self.config.rope_scaling
        frequencies, factor = self._for(positions)
        angles = positions[..., None, None].to(torch.float32) * frequencies
        if scaling is None or factor == 1.0:
            return angles.cos().to(dtype), angles.sin().to(dtype)
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def _for(self, positions: Tensor) -> tuple[Tensor, float]:
        """Frequencies on the device of `positions`, and the factor on the cosine and sine."""
        config = self.config
        if config.rope_scaling is not None and config.rope_scaling.type == "dynamic":
            # The only scaling that depends on the data: it reads the longest position back from the device.
            length = int(positions.max()) + 1
            return _dynamic(config, config.rope_scaling, length).to(positions.device), 1.0
        if positions.device not in self._frequencies:
            self._frequencies[positions.device] = scaled_frequencies(config).to(positions.device)
        factor = attention_factor(config.rope_scaling) if config.rope_scaling else 1.0
        return self._frequencies[positions.device], factor


def rotate(x_BTHK: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each head's planes. B rows, T tokens, H heads, K head_dim; cosine and sine (B, T, 1, K/2)."""
    first, second = x_BTHK.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def scaled_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each plane, (head_dim / 2,) float32. For `dynamic`, those up to the original length."""
    frequencies = _frequencies(config.rope_theta, config.head_dim)
    scaling = config.rope_scaling
    if scaling is None or scaling.type == "dynamic":
        return frequencies
    if scaling.type == "linear":
        return frequencies / scaling.factor
    if scaling.type == "llama3":
        return _llama3(frequencies, scaling, original_length(config))
    return _yarn(frequencies, config, scaling, original_length(config))


def original_length(config: ModelConfig) -> int:
    """The length the model was trained at before scaling; without one given, max_seq_len."""
    scaling = config.rope_scaling
    return (scaling.original_max_seq_len if scaling else None) or config.max_seq_len


def attention_factor(scaling: RopeScaling) -> float:
    """What multiplies cosine and sine: 1 but for YaRN, whose attention temperature grows with log(factor)."""
    if scaling.type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def _frequencies(theta: float, head_dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim))


def _dynamic(config: ModelConfig, scaling: RopeScaling, length: int) -> Tensor:
    """NTK-aware: the base grows with the sequence so that the slowest plane just fits it."""
    original = original_length(config)
    length = max(length, original)
    stretch = (scaling.factor * length / original) - (scaling.factor - 1)
    theta = config.rope_theta * stretch ** (config.head_dim / (config.head_dim - 2))
    return _frequencies(theta, config.head_dim)


def _llama3(frequencies: Tensor, scaling: RopeScaling, original: int) -> Tensor:
    """Slow planes are divided by the factor, fast ones kept, and those between blended by wavelength."""
    wavelength = 2 * math.pi / frequencies
    turns = original / wavelength
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn(frequencies: Tensor, config: ModelConfig, scaling: RopeScaling, original: int) -> Tensor:
    """Planes that turn more than beta_fast times in the original length are kept, fewer than beta_slow divided."""

    def plane(turns: float) -> float:
        """The (fractional) index of the plane that makes so many turns over the original length."""
        return config.head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = plane(scaling.beta_fast), plane(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    if low == high:
        high += 0.001
    index = torch.arange(config.head_dim // 2, dtype=torch.float32, device="cpu")
    divided = ((index - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * divided + frequencies * (1 - divided)
