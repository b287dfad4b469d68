"""Text encoders of known shapes, with random weights: what a call costs does not depend on them."""

from typing import Any, NamedTuple

from tokens import TOKENS_MAX

VOCABULARY = 30_522


class Shape(NamedTuple):
    """How large an encoder is."""

    layers: int
    width: int
    heads: int
    mlp: int


# `tiny` is for trying this without a GPU.
SHAPES = {"minilm": Shape(6, 384, 12, 1536), "bert": Shape(12, 768, 12, 3072), "tiny": Shape(2, 32, 2, 64)}


def random_encoder(shape: Shape) -> Any:
    """BERT's encoder in plain PyTorch, as a module of ids and a mask (None: nothing is padded)."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
            self.up, self.down = nn.Linear(shape.width, shape.mlp), nn.Linear(shape.mlp, shape.width)
            self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)

        def forward(self, x: Any, mask: Any) -> Any:
            rows, tokens, width = x.shape
            qkv = self.qkv(x).view(rows, tokens, 3, shape.heads, width // shape.heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = self.norm_1(x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width)))
            return self.norm_2(x + self.down(functional.gelu(self.up(x))))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(VOCABULARY, shape.width), nn.Embedding(TOKENS_MAX, shape.width)
            self.norm, self.layers = nn.LayerNorm(shape.width), nn.ModuleList([Layer() for _ in range(shape.layers)])

        def forward(self, ids: Any, mask: Any) -> Any:
            places = self.places(torch.arange(ids.shape[1], device=ids.device))
            x = self.norm(self.words(ids % VOCABULARY) + places)
            attended = None if mask is None else mask[:, None, None, :]
            for layer in self.layers:
                x = layer(x, attended)
            return x

    torch.manual_seed(0)
    return Encoder()
