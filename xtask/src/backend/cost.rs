//! What a build costs: wall and processor time, memory, and the crates that took most of it.
//!
//! Looked at from outside, in `/proc`, while Cargo runs: nothing that the build sees is another one because it is
//! measured. The processor time of the whole is the kernel's own sum over all ended children; that of a crate is what
//! its rustc, with the linker that it started, had used when it was last seen, a few hundredths of a second before its end.
//! Elsewhere than on Linux only the wall time is known.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use indicatif::HumanBytes;
use serde::Serialize;

use crate::store::record::{Resource, Statement};

/// The name of the by-product in the record that holds the figures.
const NAME: &str = "build-cost";

/// How many crates are named.
const DEAREST: usize = 5;

/// Between two looks at the processes.
const INTERVAL: Duration = Duration::from_millis(50);

/// The cost of a build.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Cost {
    /// From start to end, seconds.
    pub wall_seconds: f64,
    /// Of all processors, user and system, seconds.
    pub processor_seconds: Option<f64>,
    /// The most memory that all processes of the build had resident at once, bytes.
    pub peak_memory_bytes: Option<u64>,
    /// Crates that were compiled.
    pub crates: usize,
    /// The build went on from what an earlier one had left, so that the figures are of the rest alone.
    pub partial: bool,
    /// The crates that took the most processor time, in seconds, dearest first.
    pub dearest: Vec<(String, f64)>,
}

impl Cost {
    /// The figures as a by-product of the build.
    pub fn resource(&self) -> Resource {
        let mut annotations = BTreeMap::from([
            ("wall-seconds".to_owned(), format!("{:.1}", self.wall_seconds)),
            ("crates".to_owned(), self.crates.to_string()),
            ("partial".to_owned(), self.partial.to_string()),
        ]);
        annotations.extend(
            self.processor_seconds.map(|time| ("processor-seconds".to_owned(), format!("{time:.1}"))),
        );
        annotations
            .extend(self.peak_memory_bytes.map(|bytes| ("peak-memory-bytes".to_owned(), bytes.to_string())));
        if !self.dearest.is_empty() {
            let named: Vec<_> = self.dearest.iter().map(|(name, time)| format!("{name} {time:.1}")).collect();
            annotations.insert("dearest-processor-seconds".to_owned(), named.join(", "));
        }
        Resource { name: Some(NAME.to_owned()), uri: None, digest: BTreeMap::new(), annotations }
    }

    /// The figures in a record; `None` in records of before they were taken.
    pub fn of(record: &Statement) -> Option<Cost> {
        let by_products = &record.predicate.run_details.byproducts;
        let found = by_products.iter().find(|resource| resource.name.as_deref() == Some(NAME))?;
        let figure = |name: &str| found.annotations.get(name);
        let dearest = figure("dearest-processor-seconds").map_or("", String::as_str).split(", ");
        Some(Cost {
            wall_seconds: figure("wall-seconds")?.parse().ok()?,
            processor_seconds: figure("processor-seconds").and_then(|time| time.parse().ok()),
            peak_memory_bytes: figure("peak-memory-bytes").and_then(|bytes| bytes.parse().ok()),
            crates: figure("crates")?.parse().ok()?,
            partial: figure("partial")?.parse().ok()?,
            dearest: dearest
                .filter_map(|one| one.rsplit_once(' '))
                .filter_map(|(name, time)| Some((name.to_owned(), time.parse().ok()?)))
                .collect(),
        })
    }
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} s", self.wall_seconds)?;
        if let Some(time) = self.processor_seconds {
            write!(f, ", {time:.0} s of processor time")?;
        }
        if let Some(bytes) = self.peak_memory_bytes {
            write!(f, ", at most {} of memory", HumanBytes(bytes))?;
        }
        write!(f, ", {} crates", self.crates)?;
        if self.partial {
            write!(f, " (the rest of a build that had been broken off)")?;
        }
        for (index, (name, time)) in self.dearest.iter().enumerate() {
            write!(f, "{} {name} {time:.0} s", if index == 0 { "; dearest:" } else { "," })?;
        }
        Ok(())
    }
}

/// Measures from its start to its end.
pub(super) struct Meter {
    started: Instant,
    before: Option<f64>,
    stop: Arc<AtomicBool>,
    watcher: Option<JoinHandle<Seen>>,
}

impl Drop for Meter {
    /// Of a build that failed, nobody wants the figures.
    fn drop(&mut self) {
        self.seen();
    }
}

#[derive(Default)]
struct Seen {
    peak: u64,
    /// By process and its start: the crate and its clock ticks.
    crates: BTreeMap<(u32, u64), (String, u64)>,
}

impl Meter {
    /// Begins, before the first process of the build starts.
    pub(super) fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let watched = Arc::clone(&stop);
        let watcher = thread::spawn(move || {
            let mut seen = Seen::default();
            while !watched.load(Ordering::Relaxed) {
                look(Path::new("/proc"), std::process::id(), &mut seen);
                thread::park_timeout(INTERVAL);
            }
            seen
        });
        Meter { started: Instant::now(), before: children_seconds(), stop, watcher: Some(watcher) }
    }

    fn seen(&mut self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        let Some(watcher) = self.watcher.take() else { return Seen::default() };
        watcher.thread().unpark();
        watcher.join().unwrap_or_default()
    }

    /// Ends, after Cargo was waited for. `compiled` crates were not there before; `partial`: others were.
    pub(super) fn finish(mut self, compiled: usize, partial: bool) -> Cost {
        let wall_seconds = self.started.elapsed().as_secs_f64();
        let processor_seconds =
            self.before.zip(children_seconds()).map(|(before, after)| (after - before).max(0.0));
        let seen = self.seen();
        let mut by_crate: BTreeMap<String, u64> = BTreeMap::new();
        for (name, ticks) in seen.crates.into_values() {
            *by_crate.entry(name).or_default() += ticks;
        }
        let mut dearest: Vec<_> = by_crate.into_iter().collect();
        dearest.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        dearest.truncate(DEAREST);
        Cost {
            wall_seconds,
            processor_seconds,
            peak_memory_bytes: (seen.peak > 0).then_some(seen.peak),
            crates: compiled,
            partial,
            dearest: dearest.into_iter().map(|(name, ticks)| (name, seconds(ticks))).collect(),
        }
    }
}

/// What `/proc/<pid>/stat` says of a process; times in clock ticks, memory in pages.
#[derive(Clone, Copy)]
struct Stat {
    parent: u32,
    own: u64,
    children: u64,
    start: u64,
    pages: u64,
}

impl Stat {
    /// Reads the fields as proc(5) numbers them. The name, the second, may itself hold spaces and parentheses.
    fn parse(text: &str) -> Option<Stat> {
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
        // The first of these is field 3.
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        Some(Stat {
            parent: u32::try_from(field(4)?).ok()?,
            own: field(14)? + field(15)?,
            children: field(16)? + field(17)?,
            start: field(22)?,
            pages: field(24)?,
        })
    }
}

/// The processor time of all children that were waited for, and of theirs.
fn children_seconds() -> Option<f64> {
    let text = fs_err::read_to_string("/proc/self/stat").ok()?;
    Some(seconds(Stat::parse(&text)?.children))
}

#[cfg(target_os = "linux")]
fn seconds(ticks: u64) -> f64 {
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

#[cfg(not(target_os = "linux"))]
fn seconds(ticks: u64) -> f64 {
    ticks as f64
}

#[cfg(target_os = "linux")]
fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

#[cfg(not(target_os = "linux"))]
fn page_bytes() -> u64 {
    0
}

/// Looks at all processes below `root` in `proc`.
fn look(proc: &Path, root: u32, seen: &mut Seen) {
    let Ok(entries) = std::fs::read_dir(proc) else { return };
    let mut processes: BTreeMap<u32, Stat> = BTreeMap::new();
    for entry in entries.flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // A process that ended meanwhile has nothing to say.
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok();
        processes.extend(stat.and_then(|text| Stat::parse(&text)).map(|stat| (id, stat)));
    }
    let mut ours = BTreeSet::from([root]);
    loop {
        let more: Vec<u32> = processes
            .iter()
            .filter(|(id, stat)| ours.contains(&stat.parent) && !ours.contains(id))
            .map(|(id, _)| *id)
            .collect();
        if more.is_empty() {
            break;
        }
        ours.extend(more);
    }
    ours.remove(&root);
    let mut pages = 0;
    for id in ours {
        let stat = processes[&id];
        pages += stat.pages;
        let key = (id, stat.start);
        let name = match seen.crates.get(&key) {
            Some((name, _)) => name.clone(),
            None => match crate_name(&proc.join(id.to_string()).join("cmdline")) {
                Some(name) => name,
                None => continue,
            },
        };
        seen.crates.insert(key, (name, stat.own + stat.children));
    }
    seen.peak = seen.peak.max(pages * page_bytes());
}

/// The crate that a process compiles, as its command line says.
fn crate_name(cmdline: &Path) -> Option<String> {
    let bytes = std::fs::read(cmdline).ok()?;
    let mut arguments = bytes.split(|byte| *byte == 0);
    arguments.find(|argument| *argument == b"--crate-name")?;
    let name = std::str::from_utf8(arguments.next()?).ok()?;
    (name != "___").then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::record::{BuildDefinition, Builder, Metadata, RunDetails};

    fn example() -> Cost {
        Cost {
            wall_seconds: 194.2,
            processor_seconds: Some(366.6),
            peak_memory_bytes: Some(3 << 30),
            crates: 214,
            partial: false,
            dearest: vec![("mir_importer".to_owned(), 170.3), ("pliron".to_owned(), 111.0)],
        }
    }

    #[test]
    fn a_record_gives_back_the_figures() {
        let definition = BuildDefinition {
            build_type: String::new(),
            external_parameters: BTreeMap::new(),
            internal_parameters: BTreeMap::new(),
            resolved_dependencies: Vec::new(),
        };
        let run = RunDetails {
            builder: Builder { id: String::new(), version: BTreeMap::new() },
            metadata: Metadata { started_on: String::new(), finished_on: String::new() },
            byproducts: Vec::new(),
        };
        let mut record = Statement::new(Vec::new(), definition, run);
        assert_eq!(Cost::of(&record), None);
        for cost in [example(), Cost { wall_seconds: 1.0, partial: true, ..Cost::default() }] {
            record.predicate.run_details.byproducts = vec![cost.resource()];
            assert_eq!(Cost::of(&record), Some(cost));
        }
        assert_eq!(
            example().to_string(),
            "194 s, 367 s of processor time, at most 3.00 GiB of memory, 214 crates; dearest: mir_importer 170 s, pliron 111 s"
        );
    }

    #[test]
    fn processes_below_are_found_and_others_are_not() {
        let proc = tempfile::tempdir().unwrap();
        let lay = |id: u32, parent: u32, name: &str, ticks: u64, pages: u64, cmdline: &str| {
            let folder = proc.path().join(id.to_string());
            std::fs::create_dir_all(&folder).unwrap();
            let stat = format!(
                "{id} ({name}) S {parent} 1 1 0 -1 0 0 0 0 0 {ticks} 1 2 0 20 0 1 0 77 4096 {pages} 0"
            );
            std::fs::write(folder.join("stat"), stat).unwrap();
            std::fs::write(folder.join("cmdline"), cmdline.replace(' ', "\0")).unwrap();
        };
        lay(10, 1, "xtask", 5, 1000, "xtask setup");
        lay(11, 10, "cargo", 5, 2, "cargo build");
        lay(12, 11, "a) name (of rustc", 40, 3, "rustc --crate-name pliron lib.rs");
        lay(13, 1, "rustc", 40, 500, "rustc --crate-name foreign lib.rs");
        lay(14, 11, "rustc", 1, 1, "rustc --crate-name ___ --print cfg");
        let mut seen = Seen::default();
        look(proc.path(), 10, &mut seen);
        assert_eq!(seen.peak, 6 * page_bytes());
        lay(12, 11, "rustc", 60, 1, "rustc --crate-name pliron lib.rs");
        look(proc.path(), 10, &mut seen);
        assert_eq!(seen.peak, 6 * page_bytes());
        let crates: Vec<_> = seen.crates.into_values().collect();
        assert_eq!(crates, [("pliron".to_owned(), 63)]);
    }
}
