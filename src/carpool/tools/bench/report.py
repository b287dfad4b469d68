"""How a run looks: progress while it goes on, a table at the end."""

from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from carpool.tools.bench.tally import Report, Tally, TierReport

REFRESH_S = 0.5
PLAIN_LINE_S = 5.0
BAR_WIDTH = 60
# Above this share of a core the generator's own delay shows in the latencies.
BUSY_SHARE_MAX = 0.9


def progress_text(tally: Tally, rate: float) -> str:
    """One line on the run so far; `rate` is of late, the rest since the start."""
    p50, p99 = tally.latency.percentile(0.5), tally.latency.percentile(0.99)
    latency = "-" if p50 is None or p99 is None else f"p50 {p50:.1f} ms  p99 {p99:.1f} ms"
    return (
        f"{rate:,.0f}/s  ok {tally.ok:,}  errors {tally.errors + tally.unasked:,}  wrong {tally.wrong:,}  "
        f"in flight {tally.in_flight:,}  {latency}"
    )


class ProgressDisplay:
    """Shows progress: a live bar on a terminal, else a plain line now and then, or nothing at all."""

    def __init__(
        self, tally: Tally, duration_s: float, *, live: Console | None, say: Callable[[str], None] | None
    ) -> None:
        self._tally = tally
        self._duration_s = duration_s
        self._say = say
        self._live: Live | None = None
        # Seconds between updates; 0.0 when none are shown.
        self.interval_s = 0.0 if say is None else PLAIN_LINE_S
        self._answered_before = 0
        self._elapsed_before_s = 0.0
        if live is not None and say is not None:
            # Refreshed by hand: rich's own thread would contend with the event loop for the interpreter.
            self._live = Live(console=live, auto_refresh=False, transient=True)
            self._live.start()
            self.interval_s = REFRESH_S

    def update(self, elapsed_s: float) -> None:
        """Show the state `elapsed_s` seconds after the start."""
        answered = self._tally.ok + self._tally.wrong
        rate = (answered - self._answered_before) / max(elapsed_s - self._elapsed_before_s, 1e-3)
        self._answered_before, self._elapsed_before_s = answered, elapsed_s
        text = f"{elapsed_s:.0f} s  {progress_text(self._tally, rate)}"
        if self._live is not None:
            bar = ProgressBar(total=self._duration_s, completed=min(elapsed_s, self._duration_s), width=BAR_WIDTH)
            # The bar last: rich ends it with no line break.
            self._live.update(Group(Text(text), bar), refresh=True)
        elif self._say is not None:
            self._say(text)

    def close(self) -> None:
        """Take the live bar away."""
        if self._live is not None:
            self._live.stop()


def print_report(report: Report, console: Console) -> None:
    """Print the final table."""
    table = Table(show_header=False, title="carpool bench", title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    latency, queue = report.latency_ms, report.queue_ms
    table.add_row("rate", f"{report.rate:,.1f}/s answered of {report.intended_rate:,.1f}/s intended")
    table.add_row("sent", f"{report.sent:,}")
    table.add_row("ok", f"[green]{report.ok:,}[/green]")
    table.add_row("errors", _alarming(report.errors))
    table.add_row("wrong", _alarming(report.wrong))
    if report.unanswered:
        table.add_row("unanswered", f"[yellow]{report.unanswered:,}[/yellow]")
    table.add_row("status", "  ".join(f"{kind}: {count:,}" for kind, count in report.status.items()) or "-")
    table.add_section()
    for name, value in (
        ("latency p50", latency.p50),
        ("latency p90", latency.p90),
        ("latency p99", latency.p99),
        ("latency p99.9", latency.p999),
        ("latency max", latency.max),
        ("queue p50", queue.p50),
        ("queue p99", queue.p99),
    ):
        table.add_row(name, _ms(value))
    table.add_row("mean batch", "-" if report.batch_mean is None else f"{report.batch_mean:.1f}")
    table.add_row("generator", f"{report.generator_busy:.0%} of a core, late by {_ms(report.behind_ms.p99)} (p99)")
    if report.retries:
        table.add_row("sent again", f"{report.retries:,}")
    if report.refusal_ms.p99 is not None:
        table.add_row("refusals p99", _ms(report.refusal_ms.p99))
    console.print(table)
    if report.tiers:
        console.print(_tiers_table(report.tiers))
    if report.generator_busy > BUSY_SHARE_MAX:
        console.print("The generator used its whole core: part of the latency is its own.", style="yellow")


def _tiers_table(tiers: dict[str, TierReport]) -> Table:
    columns = ("tier", "offered", "ok", "goodput", "shed", "limited", "timed out", "failed", "wrong")
    table = Table(*columns, "p50", "p95", "p99", "refusals p99")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, tier in tiers.items():
        counts = (tier.shed, tier.limited, tier.timed_out, tier.failed, tier.wrong)
        latency = tier.latency_ms
        times = (latency.p50, latency.p95, latency.p99, tier.refusal_ms.p99)
        table.add_row(
            *(name, f"{tier.offered:,}", f"{tier.ok:,}", f"{tier.goodput:,.1f}/s"),
            *(f"{count:,}" for count in counts),
            *map(_ms, times),
        )
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f} ms"


def _alarming(count: int) -> str:
    return f"[red]{count:,}[/red]" if count else "0"
