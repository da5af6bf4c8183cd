//! A plan as text, in the order of TorchRec's planner statistics: devices, then tables with their shards, then the summary.

use std::fmt::Write;

use super::plan::PlacementPlan;
use crate::place::{HostAccess, ShardPlan, Sharding, TablePlan};

/// Maximum number of shards of a table that are listed individually; further shards are summarized.
const SHARDS_LISTED: usize = 8;

/// Formats bytes: `1.5 GiB`.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Formats microseconds: `12.3 us`, `4.1 ms`.
pub fn micros(micros: f64) -> String {
    match micros {
        m if m < 1e3 => format!("{m:.1} us"),
        m if m < 1e6 => format!("{:.1} ms", m / 1e3),
        m => format!("{:.1} s", m / 1e6),
    }
}

/// Returns the complete report.
pub fn text(plan: &PlacementPlan) -> String {
    let mut out = String::new();
    let title = format!("Planner statistics: {} placements compared", plan.candidates);
    heading(&mut out, &title);
    out.push_str(&grid(&device_rows(plan)));
    heading(&mut out, "Tables");
    out.push_str(&grid(&table_rows(plan)));
    heading(&mut out, "Shards");
    out.push_str(&grid(&shard_rows(plan)));
    if plan.tables.iter().any(|t| !t.ways.is_empty()) {
        heading(&mut out, "Access types, each alone on idle hosts");
        out.push_str(&grid(&access_rows(plan)));
    }
    heading(&mut out, "Summary");
    let tables = plan.tables.len();
    let shards: usize = plan.tables.iter().map(|t| t.shards.len()).sum();
    let _ = writeln!(out, "Batch of each host: {} requests", plan.batch);
    let _ = writeln!(out, "Critical path: {} on `{}`", micros(plan.micros), plan.slowest);
    let _ = writeln!(out, "Memory: {} for {tables} tables in {shards} shards", bytes(plan.bytes));
    for note in &plan.notes {
        let _ = writeln!(out, "Note: {note}");
    }
    out
}

fn heading(out: &mut String, title: &str) {
    let line = "-".repeat(title.chars().count() + 8);
    if !out.is_empty() {
        out.push('\n');
    }
    let _ = writeln!(out, "{line}\n--- {title} ---\n{line}");
}

fn device_rows(plan: &PlacementPlan) -> Vec<Vec<String>> {
    let head = ["Device", "Kind", "Memory", "Capacity", "Used", "Time per batch", "Load", "Shards"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for device in &plan.devices {
        let full = device.bytes as f64 / device.capacity_bytes.max(1) as f64;
        rows.push(vec![
            device.device.clone(),
            device.kind.name().into(),
            bytes(device.bytes),
            bytes(device.capacity_bytes),
            format!("{:.0} %", full * 100.0),
            micros(device.micros),
            device.load.map_or("-".into(), |l| format!("{:.1} %", l * 100.0)),
            device.shards.to_string(),
        ]);
    }
    rows
}

fn table_rows(plan: &PlacementPlan) -> Vec<Vec<String>> {
    let head = ["Table", "Tier", "Sharding", "Format", "Shards", "Bytes", "Time per batch", "Cache hits", "Why"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for table in &plan.tables {
        let tier = table.shards.first().map(|s| s.tier);
        let cached = tier.is_some_and(|t| t.is_cached());
        rows.push(vec![
            table.table.clone(),
            tier.map_or("-", |t| t.name()).into(),
            sharding(table),
            table.format.name().into(),
            table.shards.len().to_string(),
            bytes(table.bytes),
            micros(table.micros),
            if cached { format!("{:.1} %", table.hit_share * 100.0) } else { "-".into() },
            table.why.clone(),
        ]);
    }
    rows
}

/// Returns the sharding type and the number of shards.
fn sharding(table: &TablePlan) -> String {
    let name = table.sharding.name();
    match table.has_copies() && table.sharding != Sharding::DataParallel {
        true => format!("{name}, each host"),
        false => name.into(),
    }
}

fn access_rows(plan: &PlacementPlan) -> Vec<Vec<String>> {
    let head = ["Table", "Access", "Sharding", "Time per batch", "Bytes", "Chosen"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for table in &plan.tables {
        let taken = table.shards.first().map(|shard| HostAccess::of(shard.tier, table.has_copies()));
        rows.extend(table.ways.iter().map(|cost| {
            vec![
                table.table.clone(),
                cost.way.name().into(),
                format!("{} {}", cost.tier.name(), cost.sharding.name()),
                micros(cost.micros),
                bytes(cost.bytes),
                if Some(cost.way) == taken { "yes" } else { "-" }.into(),
            ]
        }));
    }
    rows
}

fn shard_rows(plan: &PlacementPlan) -> Vec<Vec<String>> {
    let head = ["Table", "Rows", "Columns", "Device", "Backed by", "Bytes", "Cache", "Time per batch"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for table in &plan.tables {
        rows.extend(table.shards.iter().take(SHARDS_LISTED).map(|s| shard_row(table, s)));
        let rest = &table.shards[table.shards.len().min(SHARDS_LISTED)..];
        if !rest.is_empty() {
            let mut row = vec![table.table.clone(), format!("and {} more", rest.len())];
            row.extend(vec![String::from("-"); 3]);
            row.push(bytes(rest.iter().map(|s| s.bytes).fold(0, u64::saturating_add)));
            row.push(bytes(rest.iter().map(|s| s.cache_bytes).fold(0, u64::saturating_add)));
            row.push(micros(rest.iter().map(|s| s.micros).fold(0.0, f64::max)));
            rows.push(row);
        }
    }
    rows
}

fn shard_row(table: &TablePlan, shard: &ShardPlan) -> Vec<String> {
    vec![
        table.table.clone(),
        format!("{}..{}", shard.rows[0], shard.rows[1]),
        format!("{}..{}", shard.columns[0], shard.columns[1]),
        shard.device.clone(),
        shard.backing.clone().unwrap_or_else(|| "-".into()),
        bytes(shard.bytes),
        if shard.cache_bytes > 0 { bytes(shard.cache_bytes) } else { "-".into() },
        micros(shard.micros),
    ]
}

/// Formats rows of cells in columns as wide as their widest cell; the first row is underlined.
fn grid(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |c: usize| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for (number, row) in rows.iter().enumerate() {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        let _ = writeln!(out, "{}", cells.join("  ").trim_end());
        if number == 0 {
            let rule: Vec<String> = widths.iter().map(|w| "-".repeat(*w)).collect();
            let _ = writeln!(out, "{}", rule.join("  "));
        }
    }
    out
}
