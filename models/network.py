"""The two architectures in small, as a torch module whose state dict has the names of the released checkpoints.

What is trained here is what vLLM and transformers compute: MLA over materialised keys and values, an indexer that
chooses index_topk tokens per query, layers that reuse another layer's choice, and one MTP layer for a draft.
The indexer learns from its own loss alone. Its inputs are detached, so the language-modelling loss never reaches it
and its loss reaches nothing else, as in the DeepSeek-V3.2 report, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NO = float("-inf")


@dataclass
class Request:
    """How one forward pass attends.

    sparse: attention sees the tokens that the indexer chose, and only these.
    rows: [batch, rows] positions of the queries on which the indexer's loss is taken; None: no loss.
    """

    sparse: bool = False
    rows: Tensor | None = None


@dataclass
class Output:
    """logits: [batch, tokens, vocabulary]; draft: the same for the token behind the next one, or None;
    index_loss: mean over layers with an indexer; coverage: the least over these layers, of the share of dense
    attention that the choice would hold; hidden: [batch, tokens, hidden] behind the last norm."""

    logits: Tensor
    draft: Tensor | None
    index_loss: Tensor
    coverage: Tensor
    hidden: Tensor


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm over the last axis; the dtype of x stays."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


def angles(tokens: int, width: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / width): [tokens, width / 2] each, fp32."""
    frequency = theta ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angle = torch.arange(tokens, device=device, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, turn: tuple[Tensor, Tensor], style: str) -> Tensor:
    """Rotate x [batch, tokens, heads, width]: pairs (2i, 2i + 1) when interleaved, (i, i + width / 2) when neox.

    turn: cos and sin, [tokens, width / 2] or [batch, tokens, width / 2].

    The pairs leave in halves for both styles. Queries and keys do so alike, so no product changes.
    """
    cos, sin = (part.unsqueeze(-2).to(x.dtype) for part in turn)
    first, second = (x[..., 0::2], x[..., 1::2]) if style == "interleaved" else x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Indexer(nn.Module):
    """score[q, k] = sum over heads of weight[q, head] * relu(query[q, head] . key[k]), scaled by fixed factors."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, rank = config["hidden_size"], config["q_lora_rank"]
        self.heads, self.width = config["index_n_heads"], config["index_head_dim"]
        self.rope = config["qk_rope_head_dim"]
        self.style = "interleaved" if config.get("indexer_rope_interleave") else "neox"
        self.wq_b = nn.Linear(rank, self.heads * self.width, bias=False)
        self.wk = nn.Linear(hidden, self.width, bias=False)
        self.k_norm = nn.LayerNorm(self.width, eps=1e-6)
        self.weights_proj = nn.Linear(hidden, self.heads, bias=False)

    def _turned(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        turned, plain = x.split([self.rope, self.width - self.rope], dim=-1)
        return torch.cat([rotate(turned, turn, self.style), plain], dim=-1)

    def prepare(
        self, x: Tensor, latent: Tensor, turn: tuple[Tensor, Tensor], rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [batch, rows, heads, width], keys [batch, tokens, width], weights [batch, rows, heads].

        rows: [batch, rows] positions of the queries; None: all tokens.
        """
        seen, turn_q = (x, turn) if rows is None else (gather_rows(x, rows), (turn[0][rows], turn[1][rows]))
        latent = latent if rows is None else gather_rows(latent, rows)
        queries = self._turned(self.wq_b(latent).unflatten(-1, (self.heads, self.width)), turn_q)
        keys = F.layer_norm(self.wk(x).float(), (self.width,), self.k_norm.weight, self.k_norm.bias, 1e-6)
        keys = self._turned(keys.to(queries.dtype)[:, :, None], turn)[:, :, 0]
        weights = self.weights_proj(seen).float() * (self.heads * self.width) ** -0.5
        return queries, keys, weights

    @staticmethod
    def scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        """[batch, rows, keys] fp32, before the causal mask."""
        batch, rows, heads, width = queries.shape
        products = (queries.reshape(batch, rows * heads, width) @ keys.transpose(1, 2)).view(batch, rows, heads, -1)
        return (weights.to(products.dtype)[:, :, None] @ F.relu(products))[:, :, 0].float()


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[b, rows[b]] for x [batch, tokens, ...]."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], rows]


class Attention(nn.Module):
    """Multi-head latent attention, dense or over the indexer's choice."""

    def __init__(self, config: dict[str, Any], has_indexer: bool) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.heads, self.rope = config["num_attention_heads"], config["qk_rope_head_dim"]
        self.nope, self.value, self.latent = config["qk_nope_head_dim"], config["v_head_dim"], config["kv_lora_rank"]
        self.topk = config["index_topk"]
        self.scaling = (self.nope + self.rope) ** -0.5
        rank = config["q_lora_rank"]
        self.q_a_proj = nn.Linear(hidden, rank, bias=False)
        self.q_a_layernorm = RMSNorm(rank, eps)
        self.q_b_proj = nn.Linear(rank, self.heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.latent + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(self.latent, eps)
        self.kv_b_proj = nn.Linear(self.latent, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, hidden, bias=False)
        self.indexer = Indexer(config) if has_indexer else None

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], request: Request, shared: Shared) -> Tensor:
        """x [batch, tokens, hidden], normalised -> what attention adds to the residual stream."""
        batch, tokens, _ = x.shape
        latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(latent).view(batch, tokens, self.heads, -1)
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        compressed, k_rope = self.kv_a_proj_with_mqa(x).split([self.latent, self.rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(compressed)).view(batch, tokens, self.heads, -1)
        k_nope, v = kv.split([self.nope, self.value], dim=-1)
        k_rope = rotate(k_rope[:, :, None], turn, "interleaved").expand(-1, -1, self.heads, -1)
        q = torch.cat([q_nope, rotate(q_rope, turn, "interleaved")], dim=-1).transpose(1, 2)
        k = torch.cat([k_nope, k_rope], dim=-1).transpose(1, 2)
        if self.indexer is not None:
            shared.choose(self.indexer, x.detach(), latent.detach(), turn, request, self.topk)
        mixed = attend(q, k, v.transpose(1, 2), self.scaling, shared.chosen)
        if request.rows is not None:
            shared.observe(q.detach(), k.detach(), self.scaling, request.rows)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))


def attend(q: Tensor, k: Tensor, v: Tensor, scaling: float, chosen: Tensor | None) -> Tensor:
    """softmax(q . k * scaling) v over earlier tokens, or over the chosen ones ([batch, tokens, tokens] bool)."""
    if chosen is None:
        wide = F.pad(v, (0, max(0, q.shape[-1] - v.shape[-1])))
        return F.scaled_dot_product_attention(q, k, wide, is_causal=True, scale=scaling)[..., : v.shape[-1]]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=chosen[:, None], scale=scaling)


class Shared:
    """What layers share: the last choice, and what the indexer that made it is to learn from.

    An indexer serves its own layer and those that reuse its choice. Its target is the mean of their attention
    distributions, each summed over heads and normalised.
    """

    def __init__(self) -> None:
        self.chosen: Tensor | None = None
        self.predicted: Tensor | None = None
        self.targets: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.coverages: list[Tensor] = []
        self.topk = 0

    def choose(
        self, indexer: Indexer, x: Tensor, latent: Tensor, turn: tuple[Tensor, Tensor], request: Request, topk: int
    ) -> None:
        """Run an indexer: its choice if attention is to be sparse, its prediction on the rows of its loss."""
        self.close()
        self.topk = topk
        if request.sparse:
            with torch.no_grad():
                self.chosen = select(*indexer.prepare(x, latent, turn), topk)
        if request.rows is not None:
            # Queries of these rows alone: with 64 heads of 128, those of all tokens would be most of a step's memory.
            scores = indexer.scores(*indexer.prepare(x, latent, turn, request.rows))
            self.predicted = scores.masked_fill(~self._allowed(request.rows, x.shape[1]), NO)

    def observe(self, q: Tensor, k: Tensor, scaling: float, rows: Tensor) -> None:
        """Note the attention distribution of a layer on the rows of the indexer's loss."""
        with torch.no_grad():
            picked = gather_rows(q.transpose(1, 2), rows).transpose(1, 2)
            logits = (picked @ k.transpose(2, 3)).float() * scaling
            logits = logits.masked_fill(~self._allowed(rows, k.shape[2])[:, None], NO)
            self.targets.append(logits.softmax(-1).mean(1))

    def close(self) -> None:
        """End an indexer's part: KL(target || predicted), mean over rows."""
        if self.predicted is not None:
            target = torch.stack(self.targets).mean(0)
            log_predicted = self.predicted.log_softmax(-1).masked_fill(target == 0, 0.0)
            entropy = torch.special.xlogy(target, target).sum(-1)
            self.losses.append((entropy - (target * log_predicted).sum(-1)).mean())
            best = self.predicted.detach().topk(min(self.topk, target.shape[-1]), dim=-1, sorted=False).indices
            self.coverages.append(target.gather(-1, best).sum(-1).mean())
        self.predicted, self.targets = None, []

    def _allowed(self, rows: Tensor, tokens: int) -> Tensor:
        if self.chosen is not None:
            return gather_rows(self.chosen, rows)
        return torch.arange(tokens, device=rows.device) <= rows[..., None]


@torch.no_grad()
def select(queries: Tensor, keys: Tensor, weights: Tensor, topk: int, rows_at_once: int = 128) -> Tensor:
    """The topk best earlier tokens of each query: [batch, tokens, tokens] bool."""
    tokens = keys.shape[1]
    chosen = torch.ones(tokens, tokens, dtype=torch.bool, device=keys.device).tril().repeat(keys.shape[0], 1, 1)
    # The first topk rows see no more than topk tokens.
    for start in range(topk, tokens, rows_at_once):
        end = min(start + rows_at_once, tokens)
        scores = Indexer.scores(queries[:, start:end], keys[:, :end], weights[:, start:end])
        scores = scores.masked_fill(~chosen[:, start:end, :end], NO)
        best = scores.topk(topk, dim=-1, sorted=False).indices
        chosen[:, start:end] = False
        chosen[:, start:end, :end].scatter_(-1, best, True)
    return chosen


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, tokens, hidden], normalised."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer; `draft` adds what an MTP layer has beside it."""

    def __init__(self, config: dict[str, Any], has_indexer: bool, draft: bool = False) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config, has_indexer)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(hidden, config["intermediate_size"])
        if draft:
            self.enorm, self.hnorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
            self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
            self.shared_head = nn.ModuleDict({"norm": RMSNorm(hidden, eps)})

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], request: Request, shared: Shared) -> Tensor:
        """The residual stream behind this layer."""
        x = x + self.self_attn(self.input_layernorm(x), turn, request, shared)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers (the draft's last) and the norm behind the backbone's."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        count = config["num_hidden_layers"]
        pattern = config.get("index_topk_pattern", "F" * count)
        layers = [Layer(config, pattern[index] == "F") for index in range(count)]
        layers += [Layer(config, True, draft=True) for _ in range(config.get("num_nextn_predict_layers", 0))]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])


class Network(nn.Module):
    """The model of one config.json; dense layers only, at most one MTP layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        if config.get("num_nextn_predict_layers", 0) > 1:
            raise ValueError(f"num_nextn_predict_layers: at most 1, got {config['num_nextn_predict_layers']}")
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """Initial weights: variance 1 / fan_in, what writes to the residual stream smaller by its depth."""
        depth = (2 * self.config["num_hidden_layers"]) ** 0.5
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            deviation = 0.5 if "embed_tokens" in name else weight.shape[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                deviation /= depth
            weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)

    def forward(self, ids: Tensor, request: Request) -> Output:
        """ids: [batch, tokens] int64 from position 0."""
        model, count = self.model, self.config["num_hidden_layers"]
        theta = self.config["rope_parameters"]["rope_theta"]
        turn = angles(ids.shape[1], self.config["qk_rope_head_dim"], theta, ids.device)
        embedded = model.embed_tokens(ids)
        x, shared = embedded, Shared()
        for layer in model.layers[:count]:
            x = layer(x, turn, request, shared)
        shared.close()
        hidden = model.norm(x)
        draft = None
        if len(model.layers) > count:
            draft = self._draft(model.layers[count], embedded, hidden, turn, request, shared)
        losses = torch.stack(shared.losses).mean() if shared.losses else hidden.new_zeros(())
        coverage = torch.stack(shared.coverages).min() if shared.coverages else hidden.new_zeros(())
        return Output(self.lm_head(hidden), draft, losses, coverage, hidden)

    def _draft(
        self,
        layer: Layer,
        embedded: Tensor,
        hidden: Tensor,
        turn: tuple[Tensor, Tensor],
        request: Request,
        shared: Shared,
    ) -> Tensor:
        """Logits of the token behind the next one, from this token's state and the next token's embedding.

        The last position has no next token; its logits are to be ignored. Position 0 carries no embedding, as in
        vLLM, where a draft never needs it.
        """
        following = embedded.roll(-1, dims=1)
        following = torch.cat([torch.zeros_like(following[:, :1]), following[:, 1:]], dim=1)
        x = layer.eh_proj(torch.cat([layer.enorm(following), layer.hnorm(hidden)], dim=-1))
        shared.chosen = None
        x = layer(x, turn, request, shared)
        shared.close()
        return self.lm_head(layer.shared_head["norm"](x))
