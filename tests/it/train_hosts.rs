//! `sterling train --hosts`: several processes that train one model, also if some of them are killed.

use std::fs;
use std::io::Read as _;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::text;
use crate::train::{TestFolder, files};

/// Batches of three micro-batches.
const TRAIN: &str = "\n[train]\nlabel = \"click\"\nbatch = 192\nuniform = 100\ntemperature = 0.2\n";
/// Part of the log line of a host that resumes from a checkpoint.
const RESUMED: &str = "resuming at step";
/// Maximum number of runs until one is killed after a checkpoint.
const RUNS_MAX: usize = 200;
const FLAGS: [&str; 6] = ["--checkpoint-steps", "3", "--epochs", "2", "--shuffle", "500"];

fn addresses(count: usize) -> String {
    let listeners: Vec<TcpListener> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addresses = listeners.iter().map(|listener| listener.local_addr().unwrap().to_string());
    addresses.collect::<Vec<_>>().join(",")
}

/// Returns the command of a host.
fn host(place: &TestFolder, out: &str, hosts: &str, rank: usize) -> Command {
    let mut command = place.command(&["--out", out, "--hosts", hosts, "--hosts-key", "key", "--join-timeout", "60"]);
    command.args(FLAGS).env("JOB_COMPLETION_INDEX", rank.to_string());
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn started(place: &TestFolder, out: &str, hosts: &str) -> Vec<Child> {
    (0..hosts.split(',').count()).map(|rank| host(place, out, hosts, rank).spawn().unwrap()).collect()
}

/// Kills hosts at `kills` moments, starts each host again that ended with an error, as Kubernetes would, and compares the output
/// with that of one host.
fn killed(kills: u64) {
    let place = TestFolder::with(TRAIN, 3000);
    fs::write(place.path("key"), "secret\n").unwrap();
    let expected = place.command(&["--out", "expected"]).args(FLAGS).output().unwrap();
    assert!(expected.status.success());
    let expected = files(&place.path("expected"));
    let start = Instant::now();
    started(&place, "first", &addresses(2)).into_iter().for_each(|mut child| assert!(child.wait().unwrap().success()));
    assert!(files(&place.path("first")) == expected, "two hosts: other bits");
    let complete = start.elapsed();
    let (mut done, mut run, mut resumed) = (0, 0, 0);
    // Kills may all come before the first checkpoint: then more runs are killed, once each.
    while done < kills || (resumed == 0 && run < RUNS_MAX) {
        let (out, hosts) = (format!("out{run}"), addresses(2 + run % 2));
        let mut all = started(&place, &out, &hosts);
        let mut last = Instant::now();
        'run: while !all[0].try_wait().unwrap().is_some_and(|ended| ended.success()) {
            // Pseudo-random moments and hosts: 61 is coprime to the 100 parts of a run.
            let draw = (done * 61 + 13) % 100;
            let victim = draw as usize % all.len();
            if done < kills.max(run as u64 + 1) && last.elapsed() >= complete.mul_f64(draw as f64 / 100.0) {
                if all[victim].try_wait().unwrap().is_none() {
                    all[victim].kill().unwrap();
                    done += 1;
                }
                last = Instant::now();
            }
            for (rank, child) in all.iter_mut().enumerate() {
                let Some(status) = child.try_wait().unwrap().filter(|status| !status.success()) else { continue };
                let mut reported = String::new();
                child.stderr.take().unwrap().read_to_string(&mut reported).unwrap();
                resumed += u64::from(reported.contains(RESUMED));
                if rank == 0 && reported.contains("it exists, expected a path that does not exist") {
                    // Host 0 was killed after the end of the run, whose package is complete.
                    break 'run;
                }
                // A host is killed, or it names the other one that it lost.
                assert!(
                    status.code().is_none() || (status.code() == Some(1) && reported.contains("host ")),
                    "{reported}"
                );
                *child = host(&place, &out, &hosts, rank).spawn().unwrap();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        for mut child in all {
            // One that was killed at the end of the run waits for the others, which have ended.
            let _ = child.kill();
            let reported = child.wait_with_output().unwrap().stderr;
            resumed += u64::from(String::from_utf8_lossy(&reported).contains(RESUMED));
        }
        assert!(files(&place.path(&out)) == expected, "{done} kills: other bits");
        run += 1;
    }
    assert!(resumed > 0, "no run was killed after a checkpoint");
}

#[test]
fn hosts_killed_at_any_moment_resume_to_the_bits_of_one() {
    killed(4);
}

#[test]
#[ignore = "long: 60 kills"]
fn hosts_killed_at_60_moments_resume_to_the_bits_of_one() {
    killed(60);
}

#[test]
fn a_silent_host_is_lost_and_commands_without_a_rank_are_rejected() {
    let place = TestFolder::with(TRAIN, 20_000);
    fs::write(place.path("key"), "secret\n").unwrap();
    let hosts = addresses(2);
    let mut first = host(&place, "out", &hosts, 0);
    let first = first.args(["--hosts-timeout", "1"]).spawn().unwrap();
    let mut second = host(&place, "out", &hosts, 1).args(["--hosts-timeout", "1"]).spawn().unwrap();
    // A stopped process has an open connection and sends nothing.
    while !place.path("out.train/checkpoints").exists() && second.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let pid = rustix::process::Pid::from_child(&second);
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let ended = first.wait_with_output().unwrap();
    let reported = String::from_utf8_lossy(&ended.stderr);
    assert!(
        ended.status.code() == Some(1) && reported.contains("host 1 (") && reported.contains("silent for 1 s"),
        "{reported}"
    );
    second.kill().unwrap();
    second.wait().unwrap();
    let ended =
        place.command(&["--out", "out", "--hosts", &hosts]).env_remove("JOB_COMPLETION_INDEX").output().unwrap();
    let reported = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.code() == Some(2) && reported.contains("--hosts without --rank"), "{reported}");
}

#[test]
fn the_kubernetes_job_uses_existing_flags() {
    let help = Command::new(env!("CARGO_BIN_EXE_sterling")).args(["train", "--help"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let manifest = text(crate::support::root().join("deploy/train-job.yaml"));
    let flags: Vec<&str> =
        manifest.split_whitespace().filter(|word| word.starts_with("--") && word.contains('=')).collect();
    assert!(flags.len() >= 6);
    for flag in flags {
        let name = flag.split('=').next().unwrap();
        assert!(help.contains(&format!("{name} ")), "{name}: {help}");
    }
}
