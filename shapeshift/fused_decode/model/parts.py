"""What an architecture is described by: rotary positions, names of tensors, experts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: the base, the rotated elements of a head, and the scaling of the frequencies.

    kind      default; linear (all divided by `factor`); llama3 and yarn (low frequencies divided, high ones kept);
              dynamic (a larger base for texts beyond `original` tokens); longrope (one of two lists of divisors);
              proportional (all divided by `factor`, and only the first `turning` pairs rotate)
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
    turning: int = 0
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

    router, correction, sinks  of experts, and of attention with sinks
    router_scale, expert_scales  see `Experts.scaled`
    dense_end, experts_norm, experts_end  see `architecture.beside`
    layer_scale   see `architecture.layer_scale`
    input_table, inputs_projection, inputs_norm  of the inputs of all layers
    input_gate, input_projection, input_norm  of those of a layer
    expert_gate_up, expert_down  of experts: with {} where the number of one stands
    shared_gate_up, shared_down, shared_gate  of the expert of all tokens
    qkv, gate_up  several names: stacked in this order; one name: one tensor holds them
    positions, attention_end, mlp_end  learned positions, and the norms after the branches; empty: none
    attention_norm, mlp_norm  the norms before the branches; empty: none
    query_norm, key_norm  see `architecture.qk_norm`; empty: they have no weights
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
    correction: str = "mlp.gate.e_score_correction_bias"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    shared_gate_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    router_scale: str = "router.scale"
    expert_scales: str = "router.per_expert_scale"
    dense_end: str = "post_feedforward_layernorm_1"
    experts_norm: str = "pre_feedforward_layernorm_2"
    experts_end: str = "post_feedforward_layernorm_2"
    layer_scale: str = "layer_scalar"
    input_table: str = "model.embed_tokens_per_layer"
    inputs_projection: str = "model.per_layer_model_projection"
    inputs_norm: str = "model.per_layer_projection_norm"
    input_gate: str = "per_layer_input_gate"
    input_projection: str = "per_layer_projection"
    input_norm: str = "post_per_layer_input_norm"
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


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta rule (arXiv:2412.06464) in place of attention: each text has a state, whatever its length is.

    key_heads    of queries and of keys; each serves `heads` / `key_heads` heads of values in a row
    kernel       tokens of the convolution before it
    stacked      one tensor holds queries, keys, values and gates, key head by key head; so does one of the shares
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    kernel: int
    stacked: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The tensors of its first linear, within a layer."""
        names = ("in_proj_qkvz",) if self.stacked else ("in_proj_qkv", "in_proj_z")
        return tuple(f"{DELTA}{name}" for name in names)

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def numbers(self) -> int:
        """Of a text's state: what the convolution looks back at, and a matrix for each head."""
        return self.kernel * self.channels + self.values * self.key_dim


DELTA = "linear_attn."
"""The beginning of the names of its tensors within a layer."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of an MLP: a token goes to those that a router scores highest.

    Each is a gated MLP. Their activation is SiLU, GELU, or with a limit that of gpt-oss.

    count   of a layer
    chosen  for a token
    width   of the MLP of an expert
    key     what config.json calls their count
    sigmoid  scores become weights by a sigmoid of each; otherwise by a softmax over all
    shares  whether the weights of the chosen are divided by their sum
    scale   factor of these weights
    scales_rows  weights multiply the rows of an expert, not what it makes of them
    groups, chosen_groups  experts of so many groups that have the two highest weights may be chosen; groups 1: all
    correction  the shape of what is added to the weights for the choice alone; empty: nothing is
    biased  the router has a bias
    scaled  the router has factors of what it reads, and each expert one of its weight
    gelu, alpha, limit  see `experts.gated`
    shared  the width of one more expert, which all tokens go to; 0: there is none
    shared_gate  its weight is a sigmoid of a score; otherwise 1
    whole   one tensor holds those of all, [count, outputs, inputs]
    columns, alternating  of such a tensor: it is [count, inputs, outputs]; outputs of gate and up alternate in it
    """

    count: int
    chosen: int
    width: int
    key: str = "num_experts"
    sigmoid: bool = False
    shares: bool = True
    scale: float = 1.0
    scales_rows: bool = False
    groups: int = 1
    chosen_groups: int = 1
    correction: tuple[int, ...] = ()
    biased: bool = False
    scaled: bool = False
    gelu: bool = False
    alpha: float = 1.0
    limit: float = 0.0
    shared: int = 0
    shared_gate: bool = False
    whole: bool = False
    columns: bool = False
    alternating: bool = False
