//! The command line. Results go to stdout, logs and progress to stderr.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | failure: the system or another one refused |
//! | 2 | bad input: a flag, a file, a name |
//! | 130, 143 | ended by SIGINT or SIGTERM before it was done |

mod ann_bench;
mod bench;
mod calibrate;
mod compact;
mod demo;
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
mod store;
mod traffic;
mod train;
mod trial;
mod wish;

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser;

use sterling_core::error::Kind;

/// Index-as-model retrieval: one snapshot, one forward pass, one answer.
#[derive(Debug, Parser)]
#[command(name = "sterling", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Publish the model in models/debian where it is not yet, show what it answers, and serve it.
    Demo(demo::Demo),
    /// Turn a model package, an index recipe and items into a version in the store.
    Publish(publish::Publish),
    /// Embed, assign and cut the items of a publication in parts, on several machines side by side.
    Parts(parts::Parts),
    /// Measure again how many lists of a published version a recall takes, with queries like those that are asked.
    Calibrate(calibrate::Calibrate),
    /// Merge the updates of a model into a version of their own, by a server or in its place.
    Compact(compact::Compact),
    /// Say which version of a model answers, at all servers of a store.
    Activate(wish::Activate),
    /// Let a label point to a version of a model, at all servers of a store.
    Label(wish::Label),
    /// Let a version answer a share of a model's requests, and none once it falls behind, at all servers of a store.
    Canary(traffic::Canary),
    /// Ask a version a share of a model's requests as well, and compare its answers, at all servers of a store.
    Shadow(traffic::Shadow),
    /// Answer over HTTP from the store's newest versions.
    Serve(serve::Serve),
    /// Answer over HTTP from the servers of all shards of a version, as one server of the whole would.
    Route(route::Route),
    /// Ask servers, routers and stores what they have, and say what is wrong.
    Doctor(doctor::Doctor),
    /// Score files of users: a Parquet file of recommendations for each, resumable at any moment.
    Score(score::Score),
    /// Train a model package on events, in their order: each is ranked before it is trained on.
    Train(train::Train),
    /// Measure the item index alone on `.npy` files, a JSON line a measurement.
    AnnBench(ann_bench::AnnBench),
    /// Put load on a running server, an open loop at a set rate, and report what became of it.
    Bench(bench::Bench),
    /// Show what a store, a snapshot or a model package holds.
    Inspect(inspect::Inspect),
    /// Decide where embedding tables lie: tiers, sharding and devices, with the reasons.
    Plan(plan::Plan),
    /// Show which kernels run on this machine's processor, and those of GPUs, or compile the latter ahead of time.
    Kernels(kernels::Kernels),
    /// Make a key for calls of a server, and the entry of its file of keys.
    Key(key::Key),
    /// Show whose rows a Redis or Valkey Cluster holds, check, load and remove them.
    Remote(remote::Remote),
    /// Run the graphs of a package or version within bounds of memory and time, as `publish` and `serve` have it done.
    #[command(hide = true)]
    Trial(trial::Trial),
}

/// Runs the command line of this process.
pub fn run() -> ExitCode {
    let cli = Cli::parse();
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
