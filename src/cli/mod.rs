//! Command line. Results are written to stdout, logs and progress to stderr.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | failure of this system or of another one, such as a disk or a server |
//! | 2 | invalid input: a flag, a file, a name |
//! | 130, 143 | ended by SIGINT or SIGTERM before it was done |

mod ann_bench;
mod bench;
mod calibrate;
mod compact;
mod demo;
mod desired;
mod doctor;
mod inspect;
mod kernels;
mod key;
mod output;
mod parts;
mod plan;
mod publish;
mod remote;
mod route;
mod score;
mod serve;
mod size;
mod store;
mod traffic;
mod train;
mod trial;

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser;

use sterling_core::error::Kind;
use sterling_kernels::signals;

/// Index-as-model retrieval: one snapshot, one forward pass, one answer.
#[derive(Debug, Parser)]
#[command(name = "sterling", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Publish the example model, print an answer, and serve it.
    Demo(demo::Demo),
    /// Publish a version from a model package, an index recipe and items.
    Publish(publish::Publish),
    /// Publish with several machines: embed, assign and shard items in parallel units.
    Parts(parts::Parts),
    /// Recalibrate a published version with representative queries: measure the lists that each target recall needs.
    Calibrate(calibrate::Calibrate),
    /// Merge the updates of a model into a new version (compaction), on a server or offline.
    Compact(compact::Compact),
    /// Set the desired version of a model on all servers of a store, or roll back to one.
    Activate(desired::Activate),
    /// Point a label to a version of a model on all servers of a store.
    Label(desired::Label),
    /// Route a share of a model's requests to a canary version with automatic rollback, on all servers of a store.
    Canary(traffic::Canary),
    /// Copy a share of a model's requests to a shadow version and compare its answers, on all servers of a store.
    Shadow(traffic::Shadow),
    /// Serve the versions of a store over HTTP.
    Serve(serve::Serve),
    /// Route requests to the servers of all shards over HTTP (scatter-gather).
    Route(route::Route),
    /// Diagnose servers, routers and stores.
    Doctor(doctor::Doctor),
    /// Batch inference: score files of users into Parquet files, resumable.
    Score(score::Score),
    /// Train a model package on events in their order; each is ranked before it is trained on.
    Train(train::Train),
    /// Benchmark the vector index alone on `.npy` files, one JSON line per measurement.
    AnnBench(ann_bench::AnnBench),
    /// Load generator: send requests to a server at a rate (open loop) and report latency, goodput and recall.
    Bench(bench::Bench),
    /// Print the content of a store, a snapshot or a model package.
    Inspect(inspect::Inspect),
    /// Plan the placement of embedding tables: tiers, sharding types and devices, with reasons.
    Plan(plan::Plan),
    /// Print the CPU and GPU kernels of this machine, or compile GPU kernels ahead of time.
    Kernels(kernels::Kernels),
    /// Create an access key and its entry in the key file.
    Key(key::Key),
    /// List, verify, load and delete table rows on a Redis or Valkey Cluster.
    Remote(remote::Remote),
    /// Run the graphs of a package or version in a sandbox with limits of memory and time, for `publish` and `serve`.
    #[command(hide = true)]
    Trial(trial::Trial),
}

/// Runs the command line of this process.
pub fn run() -> ExitCode {
    let cli = Cli::parse();
    signals::ignore_file_size_signal();
    let done = match cli.command {
        Command::Demo(command) => command.run(),
        Command::Publish(command) => command.run(),
        Command::Parts(command) => command.run(),
        Command::Calibrate(command) => command.run(),
        Command::Activate(command) => command.run(),
        Command::Label(command) => command.run(),
        Command::Canary(command) => command.run(),
        Command::Shadow(command) => command.run(),
        Command::Serve(command) => command.run(),
        Command::Score(command) => command.run(),
        Command::Train(command) => command.run(),
        Command::Compact(command) => command.run(),
        Command::Route(command) => command.run(),
        Command::Doctor(command) => command.run(),
        Command::AnnBench(command) => command.run(),
        Command::Bench(command) => command.run(),
        Command::Inspect(command) => command.run(),
        Command::Plan(command) => command.run(),
        Command::Kernels(command) => command.run(),
        Command::Key(command) => command.run(),
        Command::Remote(command) => command.run(),
        Command::Trial(command) => command.run(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::from(exit_code(error.kind()))
        }
    }
}

fn exit_code(kind: Kind) -> u8 {
    match kind {
        Kind::Invalid | Kind::NotFound | Kind::Gone | Kind::Conflict | Kind::Corrupt | Kind::Unsupported => 2,
        _ => 1,
    }
}
