//! `setup` killed anywhere, and many of them at once: the store stays valid, and the next run succeeds as it is.
//!
//! KILN_KILLS=200 asks for more random kills, KILN_KILL_SEED repeats a sequence.

mod support;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use support::server::{Server, answer};
use support::{REVISION, World, finished};
use xtask::base::hash::Sha256;

/// What dies.
#[derive(Clone, Copy, Debug)]
enum Victim {
    /// `xtask` alone: a cargo that it started lives on for a while.
    Parent,
    /// Everything that it started too, as when a terminal is closed.
    Group,
}

/// A world whose upstream comes from a server, so that a download can be killed too.
fn world() -> (World, Server) {
    let world = World::new();
    let server = Server::new(vec![answer("200 OK", &world.archive(REVISION, 6))]);
    world.edit("work/PROVENANCE", "https://example.invalid/upstream", &server.repository());
    (world, server)
}

fn start(world: &World, stop_at: Option<&str>) -> Child {
    let mut command = world.command(&["setup"]);
    command.envs(stop_at.map(|name| ("KILN_TEST_STOP_AT", name)));
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn kill(child: &mut Child, victim: Victim) {
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    // It may have ended by itself a moment ago.
    let _ = match victim {
        Victim::Parent => kill_process(pid, Signal::KILL),
        Victim::Group => kill_process_group(pid, Signal::KILL),
    };
    child.wait().unwrap();
}

/// Asserts that every entry that is there is whole.
#[track_caller]
fn assert_valid(world: &World, when: &str) {
    for kind in ["pristine", "sources"] {
        for entry in entries(&world.path("store").join(kind)) {
            let stamp = fs::read_to_string(entry.join("entry.json")).unwrap();
            let tree = xtask::source::nar::hash_tree(&entry.join("tree")).unwrap();
            assert!(stamp.contains(&tree.to_string()), "{when}: {} is not whole", entry.display());
        }
    }
    for entry in entries(&world.path("store/backends")) {
        let record = fs::read_to_string(entry.join("record.json")).unwrap();
        for name in [xtask::backend::library_name(), xtask::backend::cargo_oxide_name()] {
            let sha256 = Sha256::of(&fs::read(entry.join(&name)).unwrap()).to_string();
            assert!(record.contains(&sha256), "{when}: {} is not whole", entry.join(name).display());
        }
    }
}

/// The published entries of a folder.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let found = fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap());
    found.filter(|entry| !is_hidden(entry)).map(|entry| entry.path()).collect()
}

fn is_hidden(entry: &fs::DirEntry) -> bool {
    entry.file_name().as_encoded_bytes().starts_with(b".")
}

/// Asserts that a setup succeeds as things are, that the next one has nothing to do, and that nothing is left over.
#[track_caller]
fn assert_recovers(world: &World) {
    world.run(&["setup"]).exits(0);
    let again = world.run(&["setup"]).exits(0);
    assert_eq!(again.stdout, "setup: everything is in place, nothing was done\n");
    assert_valid(world, "at the end");
    let mut left = Vec::new();
    for folder in
        ["store/pristine", "store/sources", "store/backends", "work", "work/.cargo", "work/kernels/device"]
    {
        let hidden = fs::read_dir(world.path(folder)).unwrap().map(|entry| entry.unwrap());
        left.extend(hidden.filter(is_hidden).map(|entry| entry.path()));
    }
    left.retain(|path| *path != world.path("work/.cargo"));
    left.extend(entries(&world.path("store/build")));
    left.extend(
        entries(&world.path("store/downloads"))
            .into_iter()
            .filter(|path| !path.ends_with(format!("{REVISION}.tar.gz"))),
    );
    assert_eq!(left, Vec::<PathBuf>::new(), "left over");
    world.run(&["doctor"]).exits(0);
    world.run(&["build", "--arch", "sm_86"]).exits(0);
}

#[test]
fn e6_e8_c10_a_setup_killed_at_every_checkpoint_is_taken_up_by_the_next() {
    let (world, _server) = world();
    for (index, name) in xtask::base::checkpoint::ALL.iter().enumerate() {
        let mut child = start(&world, Some(name));
        let stop = format!("checkpoint {name}");
        let mut said = Vec::new();
        for line in BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok) {
            said.push(line);
            if said.last() == Some(&stop) {
                break;
            }
        }
        assert_eq!(said.last(), Some(&stop), "it was not reached:\n{}", said.join("\n"));
        kill(&mut child, if index % 2 == 0 { Victim::Parent } else { Victim::Group });
        assert_valid(&world, &stop);
    }
    assert_recovers(&world);
}

#[test]
fn e8_c10_a_setup_killed_at_random_instants_is_taken_up_by_the_next() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let kills = number("KILN_KILLS").unwrap_or(8);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = number("KILN_KILL_SEED").unwrap_or(now);
    eprintln!("KILN_KILL_SEED={seed}");
    let mut random = Random(seed);
    let (world, _server) = world();
    let mut killed = 0;
    while killed < kills {
        let mut child = start(&world, None);
        // Nobody reads: a pipe holds more than a setup says.
        let victim = if random.below(2) == 0 { Victim::Parent } else { Victim::Group };
        let mut polls = random.below(250);
        let done = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break Some(status);
            }
            if polls == 0 {
                break None;
            }
            polls -= 1;
            std::thread::sleep(Duration::from_millis(5));
        };
        let when = format!("seed {seed}, kill {killed} ({victim:?})");
        match done {
            None => {
                kill(&mut child, victim);
                killed += 1;
            }
            // It was faster: take something away, so that there is something to do again.
            Some(status) => {
                let mut said = String::new();
                std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut said).unwrap();
                assert!(status.success(), "{when}: {said}");
                let lost = ["pristine", "sources", "backends", "downloads", "locks", ""];
                for folder in &lost[random.below(6) as usize..] {
                    let _ = fs::remove_dir_all(world.path("store").join(folder));
                }
                let _ = fs::remove_file(world.path("work/.cargo/kiln.toml"));
            }
        }
        assert_valid(&world, &when);
    }
    assert_recovers(&world);
}

/// Sends `signal` as a terminal does: to the whole group.
fn interrupt(child: &Child, signal: Signal) {
    let group = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    // It may have ended by itself a moment ago.
    let _ = kill_process_group(group, signal);
}

/// Waits for the end of an interrupted process, which must be prompt, and returns the signal, if it ended by one.
#[track_caller]
fn ended(child: &mut Child) -> Option<i32> {
    let asked = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        assert!(asked.elapsed() < Duration::from_secs(10), "it does not end");
        std::thread::sleep(Duration::from_millis(2));
    };
    let mut said = String::new();
    if let Some(mut pipe) = child.stderr.take() {
        std::io::Read::read_to_string(&mut pipe, &mut said).unwrap();
    }
    assert!(status.success() || status.code().is_none(), "an interrupt is no failure: {status}: {said}");
    assert!(!said.contains("error["), "{status}: {said}");
    status.signal()
}

#[test]
fn e8_ctrl_c_ends_a_setup_at_once_by_the_signal_and_leaves_nothing_that_stands_in_the_way() {
    let (world, _server) = world();
    let mut ends = Vec::new();
    for round in 0..14 {
        let mut child = start(&world, None);
        std::thread::sleep(Duration::from_millis(40 * round));
        // What a shell shows as 130, and what `kill` and a closed terminal send.
        let signal = [Signal::INT, Signal::INT, Signal::TERM, Signal::HUP][round as usize % 4];
        interrupt(&child, signal);
        let by = ended(&mut child);
        assert!(by.is_none_or(|by| by == signal.as_raw()), "round {round}: {by:?}");
        ends.extend(by);
        assert_valid(&world, &format!("round {round}"));
        for kind in ["pristine", "sources", "backends"] {
            let folder = fs::read_dir(world.path("store").join(kind)).into_iter().flatten();
            let left: Vec<_> = folder.map(|entry| entry.unwrap()).filter(is_hidden).collect();
            assert!(left.is_empty(), "round {round}: {left:?}");
        }
    }
    assert!(ends.len() > 3, "no setup was slow enough to be interrupted: {ends:?}");
    assert_recovers(&world);
}

#[test]
fn e1_a_wait_for_a_lock_names_its_holder_and_ends_by_ctrl_c_or_at_its_limit() {
    let world = World::new();
    world.setup();
    // Another process, as `gc` would be.
    let lock = fs::File::create(world.path("store/locks/gc.lock")).unwrap();
    lock.lock().unwrap();
    let by = format!("process {}", std::process::id());
    for verb in
        [&["bundle", "--offline", "b.tar.gz"][..], &["verify", "--rebuild"], &["gc"], &["setup", "--offline"]]
    {
        if verb[0] == "setup" {
            fs::remove_file(world.path("work/.cargo/cuda-oxide.toml")).unwrap();
        }
        let run = world.run(&[verb, &["--lock-timeout", "0"]].concat()).exits(1).says("error[KILN-0905]");
        assert!(run.stderr.contains(&format!("gc.lock is held by {by}")), "{}", run.stderr);
    }
    let run = world.run(&["gc", "--lock-timeout", "1"]).exits(1);
    run.says(&format!("waiting at most 1 s for {by}")).says("still after 1 s");

    let mut command = world.command(&["gc"]);
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with(&format!("gc: waiting for {by}")), "{line}");
    interrupt(&child, Signal::INT);
    assert_eq!(ended(&mut child), Some(Signal::INT.as_raw()));
    drop(lock);
    world.run(&["gc", "--lock-timeout", "60"]).exits(0);
}

/// A linear congruential generator (Knuth's MMIX constants): repeatable and good enough to pick instants.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

#[test]
fn e1_eight_setups_at_once_in_one_checkout_and_in_four_build_once() {
    for checkouts in [1, 4] {
        let world = World::new();
        let folders: Vec<_> = (0..checkouts).map(|index| world.path(&format!("checkout {index}"))).collect();
        for folder in &folders {
            for inner in ["kernels/device", "backend-patches", ".cargo"] {
                fs::create_dir_all(folder.join(inner)).unwrap();
            }
            for file in ["PROVENANCE", "backend-patches/0001-change.patch"] {
                fs::copy(world.path("work").join(file), folder.join(file)).unwrap();
            }
        }
        let upstream = world.path("upstream").display().to_string();
        let start = |index: usize| {
            let mut command = world.command(&["setup", "--offline", "--source", &upstream]);
            command.current_dir(&folders[index % checkouts]).stdin(Stdio::null());
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let all: Vec<_> = (0..8).map(start).collect();
        let runs: Vec<_> =
            all.into_iter().map(|child| finished(child.wait_with_output().unwrap()).exits(0)).collect();
        let builds = runs.iter().filter(|run| run.stderr.contains("building rustc_codegen_cuda")).count();
        assert_eq!(builds, 1);
        let waited = runs.iter().filter(|run| run.stderr.contains("waiting for process ")).count();
        assert!(waited > 0, "nobody said that it waits");
        for folder in &folders {
            let mut command = world.command(&["build", "--arch", "sm_86"]);
            finished(command.current_dir(folder).output().unwrap()).exits(0);
        }
        assert_valid(&world, "after all");
    }
}

#[test]
fn e2_builds_while_a_setup_replaces_a_tampered_backend_see_one_or_the_other() {
    let world = World::new();
    world.setup();
    let library = world.backend();
    let record = library.with_file_name("record.json");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let builds = scope.spawn(|| {
            let mut seen = Vec::new();
            while !done.load(Ordering::Relaxed) {
                let run = world.run(&["build", "--arch", "sm_86"]);
                assert!(matches!(run.status, 0 | 70), "{}: {}", run.status, run.stderr);
                assert!(run.status == 0 || run.stderr.contains("error[KILN-0911]"), "{}", run.stderr);
                seen.push(run.status);
            }
            seen
        });
        // Two names change places in one step, so nothing is ever missing.
        let reads = scope.spawn(|| {
            let mut reads = 0;
            while !done.load(Ordering::Relaxed) {
                for file in [&record, &library] {
                    let present = fs::metadata(file).is_ok_and(|metadata| metadata.len() > 0);
                    assert!(present || !cfg!(target_os = "linux"), "{} was missing", file.display());
                }
                reads += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
            reads
        });
        for _ in 0..3 {
            // A new file: the old one may be mapped by a compiler that is just running.
            let tampered = library.with_file_name("tampered");
            fs::write(&tampered, "another library").unwrap();
            fs::rename(&tampered, &library).unwrap();
            world.setup();
        }
        done.store(true, Ordering::Relaxed);
        assert!(!builds.join().unwrap().is_empty());
        assert!(reads.join().unwrap() > 10);
    });
    world.run(&["build", "--arch", "sm_86"]).exits(0);
}
