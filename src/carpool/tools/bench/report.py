"""How a run looks: a line now and then while it goes on, a table at the end."""

from rich.console import Console
from rich.table import Table

from carpool.tools.bench.tally import Report, Tally, TierReport

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
