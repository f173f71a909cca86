"""What an architecture is described by: rotary positions, names of tensors, experts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: the base, the rotated elements of a head, and the scaling of the frequencies.

    kind      default; linear (all divided by `factor`); llama3 and yarn (low frequencies divided, high ones kept);
              dynamic (a larger base for texts beyond `original` tokens); longrope (one of two lists of divisors)
    rotated   elements of each head that rotate, the first ones; even; the others keep their values
    low, high  llama3: `low_freq_factor`, `high_freq_factor`; yarn: `beta_slow`, `beta_fast`
    original  tokens of the texts of the training before the scaling
    amplitude  factor of all cosines and sines
    truncated  yarn: whether its range of elements is rounded to whole ones
    short, long  longrope: the divisors for texts of at most `original` tokens, and for longer ones
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 0
    rotated: int = 0
    amplitude: float = 1.0
    truncated: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    @property
    def by_length(self) -> bool:
        """Whether the frequencies of a text depend on its length."""
        return self.kind in ("dynamic", "longrope")


@dataclass(frozen=True)
class Tensors:
    """Where a checkpoint has its tensors: names without `.weight` and `.bias`, those of a layer within it.

    router, sinks  of experts, and of attention with sinks
    gate_up, down  of experts: with {} where the number of one stands
    qkv, gate_up  several names: stacked in this order; one name: one tensor holds them
    positions, attention_end, mlp_end  learned positions, and the norms after the branches; empty: none
    attention_norm, mlp_norm  the norms before the branches; empty: none
    prefix        that checkpoints of the model without its head leave out
    wrapped       beginnings of names in files that hold another model beside this one, and what they are here
    others        beginnings of the names of that model's tensors
    renamed       names of whole tensors, as older checkpoints have them, and today's
    ignored       endings of names that hold nothing but what config.json says
    columns       weights of layers are [inputs, outputs]
    by_head       the rows of qkv are those of the first head's query, key and value, then of the second's
    """

    embedding: str = "model.embed_tokens"
    positions: str = ""
    layers: str = "model.layers"
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    attention_end: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_end: str = ""
    router: str = "mlp.gate"
    sinks: str = "self_attn.sinks"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    prefix: str = ""
    wrapped: tuple[tuple[str, str], ...] = ()
    others: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    columns: bool = False
    by_head: bool = False

    def today(self, name: str) -> str:
        """What this calls the tensor that a file calls `name`."""
        for beginning, here in self.wrapped:
            if name.startswith(beginning):
                name = here + name.removeprefix(beginning)
                break
        return dict(self.renamed).get(name, name)


EXPERT_GATE_UP = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
EXPERT_DOWN = "mlp.experts.{}.down_proj"
"""Where most checkpoints have an expert's linears."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of an MLP: a token goes to those that a router scores highest.

    Each is a gated MLP of `Architecture.intermediate`. Their activation is SiLU, or with a limit that of gpt-oss.

    count   of a layer
    chosen  for a token
    shares  whether the weights of the chosen sum to 1; otherwise they are those of a softmax over all
    biased  the router has a bias
    alpha, limit  see `experts.clamped`; limit 0: SiLU
    whole   one tensor holds those of all, [count, inputs, outputs], in which outputs of gate and up alternate
    """

    count: int
    chosen: int
    shares: bool = True
    biased: bool = False
    alpha: float = 1.0
    limit: float = 0.0
    whole: bool = False
