"""Dimensions of a Transformer that decide how long it computes.

Letters used in this package: L layers, h width of the residual stream, f width of the feed-forward network, V words
of the vocabulary, s tokens of a sequence, b sequences of a micro-batch, T = b s tokens, P parameters, t ranks of
tensor parallelism.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One stack of equal Transformer layers between an embedding and a head."""

    layers: int
    """Layers in all."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of a query or key head."""
    value_dim: int
    """Width of a value head."""
    intermediate: int
    """Inner width of the feed-forward network; of the layers without experts, where there are experts."""
    gated: bool
    """True if a gate multiplies the inner values: three matrices instead of two."""
    vocab: int
    """Rows of the embedding."""
    tied: bool
    """True if the head is the embedding."""
    causal: bool = True
    """True if a token sees only those before it."""
    rms_norm: bool = True
    """Root-mean-square norms, which libraries compute in several kernels; False: layer norms, which torch fuses."""
    ends_in_norm: bool = False
    """True if a norm follows a layer's last product."""
    norms: int = 2
    """Norms of a layer."""
    head_norms: bool = False
    """True if queries and keys are normalised."""
    head_norm_parameters: int = 0
    """Weights of a layer's norms of queries and keys."""
    rotary: float = 1.0
    """Part of each head that is rotated by its position; 0: learned positions."""
    positions: int = 0
    """Rows of learned positions."""
    stepwise_activation: bool = False
    """True if libraries compute the activation in several kernels (GELU by its tanh formula, written out)."""
    squared_activation: bool = False
    """True if the activation is a squared ReLU."""
    clamped_activation: bool = False
    """True if both halves of a gated activation are clamped first."""
    predicted: int = 1
    """Tokens that each position predicts; the head is computed for each."""
    dropout: bool = False
    """True if the residual stream is dropped out."""
    biases: str = ""
    """Matrices that have a bias: `qkv`, `qkvo` or `all`."""
    experts: int = 0
    """Routed experts of a layer; 0: none."""
    experts_per_token: int = 0
    """Routed experts that a token goes through."""
    expert_intermediate: int = 0
    """Inner width of a routed expert."""
    shared_intermediate: int = 0
    """Inner width of all shared experts together."""
    dense_layers: int = 0
    """Layers without experts, where there are experts."""
    query_rank: int = 0
    """Width to which queries are compressed (latent attention); 0: not."""
    latent_rank: int = 0
    """Width to which keys and values are compressed; 0: plain attention."""
    rotary_dim: int = 0
    """Width of latent attention's rotated key, shared by all heads."""
    keeps_scores: bool = False
    """True if scores are capped or get sinks; no attention of torch's in transformers computes these without keeping
    scores."""
    flexible: bool = False
    """True if it can use torch's flex attention, which keeps no scores."""
    biased_scores: bool = False
    """True if scores get a bias; of the attentions that keep no scores, only the efficient one adds it."""
    window: int | None = None
    """Tokens that a windowed layer sees; None: all."""
    window_fraction: float = 0.0
    """Part of the layers that have the window."""
    parts: int = 1
    """Matrices whose parameters are separate in the eager code: 1 where query, key and value are one matrix."""
    extra_parameters: int = 0
    """Parameters outside layers, embedding and head that take hardly any time."""
    unmeasured: str = ""
    """Kind of network, if no step of its kind was measured; else empty."""

    def __hash__(self) -> int:
        """Return the hash of a few fields, as a Device's of its name: few networks are asked about at a time."""
        return hash((self.layers, self.intermediate))

    @property
    def query_width(self) -> int:
        """Width of all queries together."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Width of all keys together."""
        return self.kv_heads * self.head_dim

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @cached_property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention, with its biases."""
        h, q, k = self.hidden, self.query_width, self.key_width
        if self.latent_rank:
            values = self.heads * self.value_dim
            compressed = h * self.query_rank + self.query_rank * (q + 1) if self.query_rank else h * q
            keys = self.latent_rank * self.heads * (self.head_dim - self.rotary_dim)
            shared = h * (self.latent_rank + self.rotary_dim) + self.latent_rank
            return compressed + shared + keys + self.latent_rank * values + values * h
        biases = (q + 2 * k if self.biases else 0) + (h if self.biases in ("qkvo", "all") else 0)
        return h * (q + 2 * k) + q * h + biases

    def feed_forward_parameters(self, width: int) -> int:
        """Return the weights of a feed-forward network of this inner width, with its biases."""
        matrices = 3 if self.gated else 2
        biases = (matrices - 1) * width + self.hidden if self.biases == "all" else 0
        return matrices * self.hidden * width + biases

    @property
    def norm_parameters(self) -> int:
        """Weights of one layer's norms."""
        return self.norms * self.hidden * (1 if self.rms_norm else 2) + self.head_norm_parameters

    @cached_property
    def dense_layer_parameters(self) -> int:
        """Weights of a layer without experts."""
        return self.attention_parameters + self.norm_parameters + self.feed_forward_parameters(self.intermediate)

    @property
    def router_parameters(self) -> int:
        """Weights that choose the experts."""
        return self.experts * (self.hidden + (1 if self.biases == "qkvo" else 0))

    @property
    def expert_biases(self) -> bool:
        """True if experts' products have biases."""
        return self.experts > 0 and self.biases == "qkvo"

    @cached_property
    def expert_parameters(self) -> int:
        """Weights of one routed expert."""
        bias = 2 * self.expert_intermediate + self.hidden if self.expert_biases else 0
        return self.feed_forward_parameters(self.expert_intermediate) + bias

    @cached_property
    def expert_layer_parameters(self) -> int:
        """Weights of a layer with experts."""
        shared = self.feed_forward_parameters(self.shared_intermediate) if self.shared_intermediate else 0
        around = self.attention_parameters + self.norm_parameters + self.router_parameters + shared
        return around + self.experts * self.expert_parameters

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding of words."""
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        """All weights, ties counted once."""
        layers = (self.layers - self.expert_layers) * self.dense_layer_parameters
        layers += self.expert_layers * self.expert_layer_parameters if self.experts else 0
        outside = self.embedding_parameters * (1 if self.tied else 2) + self.positions * self.hidden
        return layers + outside + self.hidden * (1 if self.rms_norm else 2) + self.extra_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Weights that a token is multiplied with."""
        return self.parameters - self.expert_layers * (self.experts - self.experts_per_token) * self.expert_parameters
