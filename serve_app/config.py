"""The configuration of one application: one YAML file, checked before anything starts.

The file is Ray Serve's own config format, so `serve run configs/app.yaml` works as it is; `AppConfig` is the `args` of
its one application. `configs/app.yaml` documents every field in place.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from engine.config import AttentionChoice, CacheDType, DType, EngineConfig, ExpertSharding, WeightDType
from engine.errors import ConfigError
from engine.request import MAX_LOGPROBS
from serve_app.auth import AuthSection
from serve_app.strict import StrictModel, complaints, suggestion

MAX_RERANK = 16
"""Candidates of one request at most, whatever the config."""

Positive = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0)]
# YAML knows lists only; the engine's config is hashable and wants tuples.
Lengths = Annotated[tuple[Positive, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]


def _model_window(value: object) -> object:
    if value is None or value == "full" or (type(value) is int and value >= 1):
        return value
    raise ValueError(f"expected a number of positions of at least 1, or full (given: {value!r})")


class AdaptiveWindowSection(StrictModel):
    """What `"window": "adaptive"` of a request means: min(most, max(least, length // divisor)) positions."""

    least: Positive = Field(default=64, description="Smallest window of a request that asks for an adaptive one.")
    divisor: int = Field(default=2, ge=1, lt=2**30, description="Beyond it, a window is the length over this.")
    most: int = Field(default=256, ge=1, lt=2**30, description="Largest adaptive window.")

    @model_validator(mode="after")
    def _check_order(self) -> "AdaptiveWindowSection":
        if self.least > self.most:
            raise ValueError(f"least is {self.least} and most {self.most}; expected them in this order")
        return self


class ModelSection(StrictModel):
    """Which model is served, and under which name."""

    source: str = Field(
        min_length=1,
        description="A .gguf file, a Hugging Face directory, package:<package>/<file> or hf:<org>/<name>[@<revision>].",
    )
    draft_source: str | None = Field(
        default=None,
        min_length=1,
        description="A small model with the same vocabulary: it guesses tokens ahead, with `engine.num_draft_tokens`, "
        "and judges candidates, with `limits.max_rerank`. Default: guesses come from the request's own tokens, and the "
        "model is its own judge.",
    )
    served_name: str | None = Field(
        default=None,
        min_length=1,
        description="The `model` of requests and of /v1/models. Default: the source's last part.",
    )
    tokenizer: str | None = Field(
        default=None, description="A source of the tokenizer alone, where the model has none with it."
    )
    chat_template: str | None = Field(
        default=None, description="A file with a Jinja chat template to use instead of the model's own."
    )
    window: Annotated[int | Literal["full"] | None, BeforeValidator(_model_window)] = Field(
        default=None,
        description="Sliding window of every layer, in positions, in place of the model's own; full: none in any. "
        "Default: the model's own. Not of the draft model.",
    )
    adaptive_window: AdaptiveWindowSection = Field(
        default_factory=lambda: AdaptiveWindowSection(), description='What `"window": "adaptive"` of a request means.'
    )

    @property
    def name(self) -> str:
        """The name that clients use."""
        return self.served_name or self.source.rstrip("/").rsplit("/", 1)[-1].partition("@")[0]


class EngineSection(StrictModel):
    """How the engine runs the model; the fields of `engine.config.EngineConfig`."""

    num_slots: Positive = Field(default=8, description="Requests that run at once.")
    max_model_len: int | None = Field(default=None, ge=2, description="Context length in tokens. Default: the model's.")
    prefill_buckets: Lengths = Field(
        default=(8, 32, 128, 512),
        min_length=1,
        description="Padded prompt-chunk lengths, ascending from 2 or more; one program each.",
    )
    context_bucket_min: Positive = Field(
        default=256, description="Smallest context bucket of attention on an accelerator; they double from it."
    )
    page_size: Positive = Field(default=16, description="Positions of a cache page; divides 128.")
    num_pages: Positive | None = Field(
        default=None, description="Pages of the KV cache. Default: the whole context of every slot."
    )
    prefix_caching: bool = Field(
        default=True, description="Keep what ended requests computed, for requests that begin with the same tokens."
    )
    step_token_budget: Positive | None = Field(
        default=None,
        description="Tokens of a step in which answers are being generated, times the prompts that wait: less keeps "
        "gaps short, more ends prompts sooner. Default: all rows and the smallest bucket (accelerator: 512).",
    )
    priority_ageing_s: float = Field(
        default=30.0, gt=0, description="Seconds of waiting that count as much as one step of a request's priority."
    )
    decode_chunk: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Tokens that one step samples of each request at most (real-time chunking).",
    )
    decode_chunk_min: int = Field(
        default=1, ge=1, le=1024, description="What chunks shrink to while something waits; they double from it."
    )
    num_draft_tokens: int = Field(
        default=0, ge=0, le=64, description="Tokens guessed ahead and verified in one step; 0: none. Changes no token."
    )
    ngram_min_len: Positive = Field(
        default=2, description="Guess what followed the last occurrence of at least this many of the last tokens."
    )
    ngram_max_len: Positive = Field(default=4, description="The most last tokens whose recurrence is looked for.")
    max_queue_len: Positive = Field(default=256, description="Requests that may wait for a slot; one more gets a 503.")
    max_queued_tokens: Positive | None = Field(
        default=None, description="Prompt tokens that may wait. Default: no limit."
    )
    activation_dtype: DType = Field(
        default="float32", description="Type of activations. float32 on CPU, bfloat16 on GPU."
    )
    weight_dtype: WeightDType = Field(
        default="float32",
        description="Type of weights in memory. float32 on CPU, bfloat16 on GPU; int8 for accelerators short of "
        "memory: kept where the checkpoint is int8, else made while loading.",
    )
    expert_sharding: ExpertSharding = Field(
        default="width", description="Experts over the model axis: each divided by its width, or whole ones dealt out."
    )
    cache_dtype: CacheDType | None = Field(
        default=None,
        description="Type of the KV cache. Default: that of the activations. int8 has a scale for each token and head.",
    )
    attention_kernel: AttentionChoice = Field(
        default="auto",
        description="Attention of decode. pallas: the kernel for NVIDIA GPUs. auto: that one where it passes a check "
        "at the start, else reference.",
    )
    batch_invariant: bool = Field(
        default=False, description="Same tokens whatever else runs; slower (every step computes all slots)."
    )

    def to_engine_config(self) -> EngineConfig:
        """Raises `ConfigError` naming the field that cannot work."""
        return EngineConfig(**self.model_dump())


class MeshSection(StrictModel):
    """The device mesh of one replica: a shape within each host, times a shape between hosts."""

    data: Positive = Field(default=1, description="Devices of each host along the data axis: it splits the batch.")
    model: Positive = Field(
        default=1, description="Devices of each host along the model axis: it splits weights and heads."
    )
    hosts_along_data: Positive = Field(default=1, description="Hosts of a replica along the data axis.")
    hosts_along_model: Positive = Field(default=1, description="Hosts of a replica along the model axis.")
    devices_per_host: Positive | None = Field(
        default=None, description="Devices that each host has, where it has more than data times model."
    )
    hosts: Positive | None = Field(
        default=None, description="Hosts of a replica, as a check: the product of those along both axes."
    )
    host_placement: Literal["apart", "packed"] = Field(
        default="apart",
        description="Where the hosts of a replica run: each on a machine of its own, or several on one.",
    )
    host_start_timeout_s: PositiveSeconds = Field(
        default=300.0, description="Time that all hosts of a replica have to come to its leader, in seconds."
    )
    host_silence_timeout_s: PositiveSeconds = Field(
        default=10.0, description="A host that gives no sign of life for longer has failed, and its replica with it."
    )
    platform: Literal["auto", "cpu", "gpu", "tpu"] = Field(
        default="auto",
        description="Where to run. auto: the best there is. Anything else is required, or the start is refused.",
    )
    memory_fraction: float = Field(
        default=0.9, gt=0, le=1, description="Share of each accelerator's memory that the replica may take."
    )

    @model_validator(mode="after")
    def _check_hosts(self) -> "MeshSection":
        if self.hosts not in (None, self.num_hosts):
            raise ValueError(
                f"hosts is {self.hosts}; expected hosts_along_data times hosts_along_model, {self.num_hosts}"
            )
        if self.devices_per_host is not None and self.devices_per_host < self.data * self.model:
            raise ValueError(
                f"devices_per_host is {self.devices_per_host}; expected at least data times model, "
                f"{self.data * self.model}"
            )
        return self

    @property
    def num_hosts(self) -> int:
        """Hosts of a replica."""
        return self.hosts_along_data * self.hosts_along_model


class LimitsSection(StrictModel):
    """What one request may ask for."""

    default_max_tokens: Positive = Field(
        default=16, description="`max_tokens` of a completion that names none (OpenAI: 16)."
    )
    default_chat_max_tokens: Positive | None = Field(
        default=None, description="`max_tokens` of a chat completion that names none. Default: what the context leaves."
    )
    max_tokens: Positive | None = Field(
        default=None, description="Largest `max_tokens` a request may name. Default: the context length."
    )
    default_deadline_s: PositiveSeconds = Field(
        default=600.0, description="Deadline of a request that names none, in seconds."
    )
    max_deadline_s: PositiveSeconds = Field(
        default=3600.0, description="Longest deadline a request may name, in seconds."
    )
    max_body_bytes: Positive = Field(
        default=8 * 2**20, description="Largest HTTP body in bytes; a larger one gets a 413."
    )
    body_timeout_s: PositiveSeconds = Field(
        default=60.0, description="How long a body may take to come, in seconds; a slower one gets a 408."
    )
    max_stop_strings: Positive = Field(default=4, description="Stop strings of one request (OpenAI: 4).")
    max_stop_string_chars: Positive = Field(default=256, description="Characters of one stop string.")
    max_prompts: Positive = Field(default=64, description="Prompts of one completion request.")
    max_logprobs: int = Field(
        default=MAX_LOGPROBS,
        ge=0,
        le=MAX_LOGPROBS,
        description="Most alternatives a request may ask for at each position.",
    )
    max_rerank: int = Field(
        default=0,
        ge=0,
        le=MAX_RERANK,
        description=f"Most candidates of a request's `rerank`, 2 to {MAX_RERANK}; 0: it is refused. Scoring them takes "
        "one more program, and a cache of its own for one context.",
    )

    @model_validator(mode="after")
    def _check_order(self) -> "LimitsSection":
        if self.default_deadline_s > self.max_deadline_s:
            raise ValueError(
                f"default_deadline_s is {self.default_deadline_s:g}; expected at most max_deadline_s,"
                f" {self.max_deadline_s:g}"
            )
        if self.max_rerank == 1:
            raise ValueError(f"max_rerank is 1; expected 0 (off), or 2 to {MAX_RERANK} candidates")
        return self


class AutoscalingSection(StrictModel):
    """How many engine replicas there are, by what is asked of them; fields of Ray Serve's `AutoscalingConfig`."""

    min_replicas: Positive = Field(
        default=1, description="Fewest engine replicas. A section `autoscaling` stands instead of num_replicas."
    )
    initial_replicas: Positive | None = Field(default=None, description="Replicas at the start. Default: min_replicas.")
    max_replicas: Positive = Field(default=1, description="Most engine replicas.")
    target_ongoing_requests: float | None = Field(
        default=None,
        gt=0,
        description="Requests that each replica should have, running or waiting. Default: three quarters of its slots.",
    )
    look_back_period_s: PositiveSeconds = Field(
        default=30.0, description="The number of requests is the mean over this time."
    )
    upscale_delay_s: float = Field(
        default=30.0, ge=0, description="There must be too few replicas for this long before one is added."
    )
    downscale_delay_s: float = Field(
        default=600.0, ge=0, description="There must be too many for this long before one is taken away."
    )

    @model_validator(mode="after")
    def _check_order(self) -> "AutoscalingSection":
        initial = self.min_replicas if self.initial_replicas is None else self.initial_replicas
        if not self.min_replicas <= initial <= self.max_replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas}, initial_replicas {initial} and max_replicas "
                f"{self.max_replicas}; expected them in this order"
            )
        return self


class ServingSection(StrictModel):
    """How Ray Serve runs the application."""

    num_replicas: Positive = Field(
        default=1, description="Engine replicas, each with its own mesh. Not with autoscaling."
    )
    autoscaling: AutoscalingSection | None = Field(
        default=None, description="As many engine replicas as the requests need, instead of num_replicas."
    )
    max_surge_percent: int = Field(
        default=0,
        ge=0,
        le=100,
        description="Upgrades: extra replicas that start before old ones stop, in percent of all; they need free "
        "devices. 0: an old one stops first.",
    )
    num_ingress_replicas: Positive = Field(default=1, description="Processes that parse HTTP, tokenize and stream.")
    replica_num_cpus: float = Field(default=1.0, ge=0, description="CPU cores that Ray reserves for an engine replica.")
    replica_num_gpus: float = Field(default=0.0, ge=0, description="GPUs that Ray reserves for an engine replica.")
    ingress_num_cpus: float = Field(
        default=0.1, ge=0, description="CPU cores that Ray reserves for an ingress process."
    )
    max_ongoing_requests: Positive | None = Field(
        default=None,
        description="HTTP requests under way at one engine replica. Default: its slots, its queue, and 16 more.",
    )
    graceful_shutdown_s: PositiveSeconds = Field(
        default=600.0, description="How long running requests may go on once their replica is to stop, in seconds."
    )
    health_check_period_s: PositiveSeconds = Field(
        default=5.0, description="Seconds between health checks of a replica."
    )
    health_check_timeout_s: PositiveSeconds = Field(default=30.0, description="A check that takes longer has failed.")
    step_timeout_s: PositiveSeconds = Field(
        default=300.0, description="A step that takes longer counts as a dead engine: the replica is replaced."
    )

    @model_validator(mode="after")
    def _check_replicas(self) -> "ServingSection":
        if self.autoscaling is not None and self.num_replicas != 1:
            raise ValueError("num_replicas and autoscaling are both given; expected one of them")
        return self

    @property
    def max_replicas(self) -> int:
        """The most engine replicas that there may be, but for upgrades."""
        return self.num_replicas if self.autoscaling is None else self.autoscaling.max_replicas


class AppConfig(StrictModel):
    """One application."""

    model: ModelSection = Field(description="Which model is served.")
    engine: EngineSection = Field(default_factory=lambda: EngineSection(), description="How the engine runs it.")
    mesh: MeshSection = Field(default_factory=lambda: MeshSection(), description="The device mesh of one replica.")
    limits: LimitsSection = Field(default_factory=lambda: LimitsSection(), description="What one request may ask for.")
    serving: ServingSection = Field(default_factory=lambda: ServingSection(), description="How Ray Serve runs it.")
    auth: AuthSection = Field(default_factory=lambda: AuthSection(), description="Who may use the server.", repr=False)
    compilation_cache_dir: str | None = Field(
        default="~/.cache/jax-serve/programs",
        description="Where compiled programs are kept between starts, and found by further replicas; null: nowhere.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Least level that is logged."
    )

    @model_validator(mode="after")
    def _check_engine(self) -> "AppConfig":
        try:
            self.engine.to_engine_config()
        except ConfigError as error:
            raise ValueError(f"engine.{error}") from None
        if self.model.draft_source is not None and not self.engine.num_draft_tokens and not self.limits.max_rerank:
            raise ValueError(
                "model.draft_source is given and engine.num_draft_tokens and limits.max_rerank are 0; expected one of "
                "them above 0, or no draft_source"
            )
        if self.limits.max_rerank and self.mesh.num_hosts > 1:
            raise ValueError(
                f"limits.max_rerank is {self.limits.max_rerank} and the mesh spans {self.mesh.num_hosts} hosts; "
                "candidates are scored on a mesh of one host only"
            )
        return self

    @property
    def max_in_flight(self) -> int:
        """Requests that one replica holds, running or waiting."""
        return self.engine.num_slots + self.engine.max_queue_len

    @property
    def max_ongoing_requests(self) -> int:
        """Calls that Serve passes to one engine replica at once.

        The default leaves room above `max_in_flight`, so that it is the engine that refuses (at once, with a 503)
        and not Serve that queues.
        """
        return self.serving.max_ongoing_requests or self.max_in_flight + 16


class HTTPSection(StrictModel):
    """Serve's `http_options`, as far as this project uses them."""

    host: str = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0: every interface.")
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port to listen on.")
    request_timeout_s: PositiveSeconds | None = Field(
        default=None, description="Serve's own limit for a request. Requests have deadlines: leave it unset."
    )
    keep_alive_timeout_s: Positive = Field(default=90, description="Seconds an idle connection is kept.")


class ApplicationSection(StrictModel):
    """The one application of the file."""

    name: str = Field(default="llm", min_length=1, description="Its name in `serve status`.")
    route_prefix: str = Field(default="/", pattern="^/", description="Path under which it answers.")
    import_path: Literal["serve_app.app:build"] = Field(description="The builder: always serve_app.app:build.")
    args: AppConfig = Field(description="This project's configuration.")
    runtime_env: dict[str, Any] = Field(default_factory=dict, description="Ray's runtime environment.")


class ServeFile(StrictModel):
    """The whole file."""

    proxy_location: Literal["HeadOnly", "EveryNode"] = Field(
        default="EveryNode", description="Which machines listen for HTTP: the head, or all that run a replica."
    )
    http_options: HTTPSection = Field(default_factory=lambda: HTTPSection(), description="Where to listen.")
    applications: list[ApplicationSection] = Field(min_length=1, max_length=1, description="Exactly one.")

    @property
    def application(self) -> ApplicationSection:
        """The one application."""
        return self.applications[0]


def parse_app_config(args: dict[str, Any]) -> AppConfig:
    """`args` of the file as a config. Raises `ConfigError` that lists every wrong field."""
    try:
        return AppConfig.model_validate(args)
    except ValidationError as error:
        raise ConfigError(_report("args", complaints(AppConfig, error))) from None


def load_file(path: Path) -> ServeFile:
    """Reads and checks the whole file. Raises `ConfigError` that lists every wrong field."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no mapping; expected the fields of configs/app.yaml")
    if "applications" not in content:
        hint = suggestion("applications", content) or "; see configs/app.yaml"
        raise ConfigError(f"{path}: applications is missing{hint}")
    try:
        return ServeFile.model_validate(content)
    except ValidationError as error:
        raise ConfigError(_report(str(path), complaints(ServeFile, error))) from None


def _report(where: str, found: list[tuple[str, str]]) -> str:
    if len(found) == 1:
        return f"{where}: {_line(*found[0])}"
    return "\n".join([f"{where}: {len(found)} problems", *(f"  {_line(*complaint)}" for complaint in found)])


def _line(field: str, problem: str) -> str:
    return f"{field}: {problem}" if field else problem
