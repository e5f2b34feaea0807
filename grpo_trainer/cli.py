"""The `grpo` command. Imports stay light: a command imports what it needs when it runs."""

from __future__ import annotations

import locale
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from grpo_common.errors import UserError
from grpo_common.status import OWN
from grpo_common.text import printable
from grpo_trainer import __version__
from grpo_trainer.config.flags import given, taking
from grpo_trainer.config.options import build, by_name
from grpo_trainer.config.processes import BUILT_IN, RunConfig, RunSection, environment_command
from grpo_trainer.config.rules import SET_BY_THE_RUN, checked
from grpo_trainer.config.run import GPUS_PER_NODE, build_run, read_toml
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import ConfigError, from_os_error
from grpo_trainer.servers import app as servers
from grpo_trainer.signals import stopped_at_once
from grpo_trainer.suggestions import flags_of, unknown_word

app = typer.Typer(
    name="grpo",
    help="Train a language model with GRPO. A vLLM server generates the answers, and gets new weights during training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(servers)
UTF8_VARIABLE = "PYTHONUTF8"
"""Environment variable that turns Python's UTF-8 mode on."""
FAST_4_BITS = "bitsandbytes.backends.cpu.ops"
"""Where bitsandbytes, which PEFT imports in every run, asks for a faster kernel for 4 bits on CPUs. The trainer does
not use that kernel, which has no backward pass; `model.load` warns a user who asks for 4 bits on a CPU."""
ANY_FLAG = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Unknown flags are ours to judge: some are an environment's, and for the others we know what was meant."""
PASS_THROUGH = {**ANY_FLAG, "help_option_names": []}
FIRST = (
    *("--config", "--model-name", "--weight-bridge-mode", "--training-steps", "--batch-size"),
    *("--gradient-accumulation-steps", "--lr", "--seq-len", "--lora-r", "--loss", "--resume", "--log-to"),
)
"""Flags that matter first: the others have good defaults."""
FIRST_OF_A_RUN = (
    *("--config", "--model-name", "--data", "--reward", "--env", "--weight-bridge-mode", "--training-steps"),
    *("--prompts-per-step", "--env.group_size", "--env.max_tokens", "--env.temperature", "--lr", "--kl-beta"),
    *("--seq-len", "--lora-r", "--loss", "--eval-every", "--log-samples", "--run-dir", "--resume"),
)
TRAIN_EXAMPLE = (
    "for example: grpo train --model-name runs/demo-model --weight-bridge-mode lora_only; to start rollout API, server "
    "and environment too, as most people want, use `grpo run` with the same options"
)
"""The fix that `grpo train` adds to its errors if it got no option at all."""
ENVIRONMENT_HELP = """Usage: grpo env NAME serve|process|evaluate|try [OPTIONS]

NAME: {names},
or a module or file of yours.

  serve     send scored groups to the rollout API, as in a run
  process   write scored groups to a file and an HTML page, without a trainer
  evaluate  score the server's answers to held-out items
  try       check it without a server: setup, a prompt, two scores

Each command lists its options: grpo env NAME serve --help.
Before the first use of verifiers: grpo env verifiers install."""
Environment = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Environment: {', '.join(BUILT_IN)}, or a Python module or file of yours (default: arithmetic). "
        "--env.KEY and --openai.KEY set its options (listed by: grpo env NAME serve --help).",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="D",
        help="Your data: a file, a folder or a hub name. Files are JSONL, JSON, CSV, TSV or Parquet. --data.KEY sets "
        "options, which `grpo env dataset serve --help` lists.",
    ),
]
Reward = Annotated[
    list[str] | None,
    typer.Option(
        metavar="R",
        help="Reward: FILE.py:FUNCTION or MODULE:FUNCTION, exact_match, math or regex:PATTERN. It may be repeated; "
        "FILE.py:FUNCTION=0.1 has a weight.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="PATH", help="TOML file with these options (flags win)."),
]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"grpo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(cls=taking(RunSection, *FIRST_OF_A_RUN, hidden=SET_BY_THE_RUN), context_settings=ANY_FLAG)
def run(
    ctx: typer.Context,
    config: ConfigFile = None,
    env: Environment = None,
    data: Data = None,
    reward: Reward = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Try the environment, print the processes that the run would start, and start none."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print one JSON object.")] = False,
    slurm: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a Slurm job script that runs this on a cluster, and start nothing."),
    ] = None,
    gpus_per_node: Annotated[
        int, typer.Option(help="With --slurm: GPUs of each node; 0: run on CPUs.", min=0, metavar="INT")
    ] = GPUS_PER_NODE,
) -> None:
    """Start rollout API, vLLM server, environments and trainer, and supervise them until training is done."""
    more = {"cluster": "auto"} if slurm else {}
    run_config = _read_run(ctx, config, {"env": env, "data": data, "reward": reward, **more})
    if as_json and not dry_run:
        raise ConfigError(field="--json", got="no --dry-run", wanted="--dry-run with it", fix="add --dry-run")
    if slurm and dry_run:
        fix = f"leave out --dry-run: --slurm starts nothing, and {slurm} shows what the job will start"
        raise ConfigError(field="--dry-run", got="--slurm, too", wanted="one of them", fix=fix)
    if slurm:
        from grpo_trainer.dry_run import write_job

        job = write_job(run_config, slurm, gpus_per_node, sys.argv[sys.argv.index("run") + 1 :])
        typer.echo(f"{slurm}: {len(job.plan.processes)} processes on {job.nodes} nodes; submit it by: sbatch {slurm}")
        return
    from rich.console import Console

    if dry_run:
        from grpo_trainer import dry_run as plan

        ahead = plan.look_ahead(run_config, partial(typer.echo, err=True))
        if as_json:
            typer.echo(plan.as_json(ahead))
        else:
            plan.print_ahead(ahead, Console())
        return
    with stopped_at_once():  # the supervisor takes over once it starts processes
        from grpo_trainer.run import run as supervise

        supervise(run_config, Console())


@app.command(
    cls=taking(TrainConfig, *FIRST, "--atropos-url", "--server.port", "--save-path"), context_settings=ANY_FLAG
)
def train(ctx: typer.Context, config: ConfigFile = None) -> None:
    """Start only the trainer: it takes rollouts from a rollout API and publishes its weights to a vLLM server.

    Start the rollout API and the environments yourself. Start the server yourself, too, except with
    --weight-bridge-mode none or lora_restart: there the trainer starts it. `grpo run` starts all of them.
    """
    known = ["--config", *(f"--{name.replace('_', '-')}" for name in by_name(TrainConfig))]
    problems = [unknown_word(word, known) for word, _ in flags_of(ctx.args)]
    tables = (read_toml(config) if config else {}, given(ctx))
    try:
        train_config = checked(build(TrainConfig, *tables, problems=problems))
    except ConfigError as error:
        if not any(tables):
            error.add(fix=TRAIN_EXAMPLE)
        raise
    from grpo_trainer.phases import COMMAND_VARIABLE, begin_start

    if os.environ.get("RANK", "0") == "0":  # who leads looks for all; `grpo run` has looked, and starts the others
        _look_before_the_start(train_config, by_hand=COMMAND_VARIABLE not in os.environ)
    begin_start()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads sleep: a server may share the cores
    from grpo_trainer.loop import train as train_loop

    train_loop(train_config)


@app.command(
    cls=taking(RunSection, *FIRST_OF_A_RUN, "--for-gpus", "--json", hidden=SET_BY_THE_RUN), context_settings=ANY_FLAG
)
def doctor(
    ctx: typer.Context,
    config: ConfigFile = None,
    env: Environment = None,
    data: Data = None,
    reward: Reward = None,
    for_gpus: Annotated[
        str | None,
        typer.Option(metavar="GPUS", help="Only plan memory, for GPUs elsewhere: 24, or 4x80 (GB)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Check if `grpo run` would work with these options; without any, the machine."""
    from rich.console import Console

    from grpo_trainer.doctor import checks
    from grpo_trainer.machine import described_machine, look

    run_config: RunConfig | ConfigError | None = None
    if config or given(ctx) or env or data or reward or ctx.args:
        try:
            run_config = _read_run(ctx, config, {"env": env, "data": data, "reward": reward})
        except ConfigError as error:
            run_config = error
    elif for_gpus:
        wanted = "the options of a run"
        raise ConfigError(field="--for-gpus", got="no run", wanted=wanted, fix="add --model, or --config")
    machine = described_machine(for_gpus) if for_gpus else look()
    with stopped_at_once():  # it ends the processes that it has started
        findings, memory = checks.examine(machine, run_config, is_here=not for_gpus)
    if as_json:
        typer.echo(checks.as_json(findings, memory))
    else:
        checks.print_findings(findings, memory, Console())
    raise typer.Exit(1 if checks.fails(findings) else 0)


@app.command(context_settings=PASS_THROUGH)
def serve(ctx: typer.Context) -> None:
    """Run the vLLM server with the routes that weight bridges and environments need; see `grpo serve --help`."""
    _become("vllm_server", ctx.args)


@app.command(context_settings=PASS_THROUGH)
def api(ctx: typer.Context) -> None:
    """Run the rollout API that environments post to and the trainer pulls from; see `grpo api --help`."""
    _become("environments.api", ctx.args)


@app.command(context_settings=PASS_THROUGH)
def env(ctx: typer.Context) -> None:
    """Run a built-in environment, or your own module or file: `grpo env NAME serve …`."""
    if not ctx.args or ctx.args[0] in ("-h", "--help"):
        typer.echo(ENVIRONMENT_HELP.format(names=", ".join(BUILT_IN)))
        raise typer.Exit(0 if ctx.args else 2)
    name = ctx.args[0]
    module, *named = environment_command(name, said="grpo env")
    _become(module, [*named, *ctx.args[1:]], called=f"grpo env {name}")


@app.command("export")
def export_checkpoint(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run's folder for its newest checkpoint.")],
    output: Annotated[
        Path | None,
        typer.Argument(help="Folder to write; default: exported_… or merged_… in the checkpoint's parent folder."),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into a copy of its base model.")] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16 (default: the checkpoint's dtype; with --merge the base model's)."
        ),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(help="The adapter's base model, if it is not the one that the adapter's configuration names."),
    ] = None,
) -> None:
    """Write a checkpoint as a folder that transformers or PEFT can load."""
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ConfigError(field="--dtype", got=dtype, wanted="float32, bfloat16 or float16")
    how = "with the adapter merged into its base model" if merge else "without the trainer's state"
    typer.echo(f"writes the checkpoint of {checkpoint} {how} to {output or 'a folder next to it'}", err=True)
    from grpo_trainer.saving.export import ExportOptions
    from grpo_trainer.saving.export import export_checkpoint as write

    typer.echo(write(ExportOptions(checkpoint, output, merge, dtype, model_name), partial(typer.echo, err=True)))


@app.command(context_settings={**PASS_THROUGH, "allow_interspersed_args": False})  # leaves -- in the arguments
def bench(ctx: typer.Context) -> None:
    """Benchmarks: `loop` measures a whole run, `step` optimisation steps, `sync` a weight bridge, `api` a rollout
    API."""
    _become("grpo_trainer.bench", ctx.args)


@app.command()
def report(
    run_dirs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run folders. With several, the page compares them (default: the newest of runs/).",
            metavar="RUN_DIR…",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="File to write (default: report.html in the run's folder; for several runs comparison-NAMES.html in "
            "the first)."
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Rewrite the page every 5 s until the run ends.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each run's figures and verdict as a JSON list, and write no page.")
    ] = False,
) -> None:
    """Write an HTML page with a run's plots, samples, configuration and events; with several runs compare them."""
    from grpo_trainer.report import page
    from grpo_trainer.servers import newest

    run_dirs = run_dirs or [newest()]
    if as_json and (output or watch):
        got = "--output" if output else "--watch"
        raise ConfigError(field="--json", got=f"{got}, too", wanted="one of them", fix=f"leave out {got}")
    if as_json:
        typer.echo(page.as_json(run_dirs))
        return
    path = page.report_path(run_dirs, output)
    if watch:
        typer.echo(f"{path}: refreshed until the run is done; Ctrl-C ends that")
        page.watch(run_dirs, path)
    else:
        page.write_report(run_dirs, path)
    typer.echo(path)


@app.command("runs")
def list_runs(
    folder: Annotated[Path, typer.Argument(help="Folder that holds runs, two levels down at most.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """List the runs in a folder: weight bridge, model, steps, reward and whether each is running, done or stopped."""
    from rich.console import Console

    from grpo_trainer.report import runs

    found = runs.list_runs(folder)
    if as_json:
        typer.echo(runs.as_json(found))
    else:
        runs.print_runs(found, folder, Console())


@app.command("demo-model", context_settings=PASS_THROUGH)
def demo_model(ctx: typer.Context) -> None:
    """Make a small model to try: the quickstart's, or with --released SmolLM2-135M-Instruct."""
    _become("environments.demo_model", ctx.args)


def _read_run(ctx: typer.Context, config: Path | None, own: dict[str, Any]) -> RunConfig:
    """Return a run's configuration; `own` has the flags that are no options of a table."""
    flags = given(ctx) | {key: value for key, value in own.items() if value}
    return build_run(read_toml(config) if config else {}, flags, ctx.args)


def _become(module: str, arguments: list[str], called: str | None = None) -> None:
    """Replace this process by a module's own command, so that signals and exit codes are its own.

    An environment calls itself `called` in its messages.
    """
    sys.stdout.flush()
    environment = os.environ | ({"GRPO_CALLED_AS": called} if called else {})
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], environment)


def _look_before_the_start(config: TrainConfig, *, by_hand: bool) -> None:
    """Refuse to begin where there is no model, or the first checkpoints don't fit; say so where later ones won't.

    A trainer that is started by hand also names the commands of what is not there yet; it waits for it.
    """
    from grpo_trainer.doctor.before_start import refuse_missing, refuse_without_room, warn_of_lr
    from grpo_trainer.launch.plan import commands_to_start
    from grpo_trainer.machine import look

    log = logging.getLogger(__name__)
    if by_hand:
        refuse_missing(config.model_name)
        warn_of_lr(config)
    found = refuse_without_room(config, config.save_path, "--save-path", on_gpu=config.device != "cpu")
    if found.status == "warn":
        text = "the disk will be full before the last step: got %s, wanted %s; %s"
        log.warning(text, found.got, found.wanted, found.fix)
    for missing, commands in (commands_to_start(config, on_gpu=look().on_gpu) if by_hand else {}).items():
        lines = "".join(f"\n    {command}" for command in commands)
        log.warning("no %s yet; the trainer waits for it. To start it:%s", missing, lines)


def main() -> None:
    """Entry point: an error that the user can mend is one message and an exit code, anything else a traceback."""
    # Files and lines of a run are UTF-8: where the locale has another encoding, start again in Python's UTF-8 mode,
    # which the processes of a run inherit.
    if not locale.getencoding().lower().startswith("utf") and os.environ.get(UTF8_VARIABLE) != "1":
        os.execve(sys.executable, sys.orig_argv, {**os.environ, UTF8_VARIABLE: "1"})
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger(FAST_4_BITS).setLevel(logging.ERROR)
    OWN.open()
    try:
        app()
    except UserError as error:
        _fail(error)
    except OSError as error:
        known = from_os_error(error, "read or write")
        if known is None:
            raise
        _fail(known)


def _fail(error: UserError) -> None:
    lines = (printable(line, None) for line in f"grpo: {error}".split("\n"))  # it may quote an environment's text
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()
    sys.exit(error.exit_code)
