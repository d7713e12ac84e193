//! Ctrl-C and its like: the process ends at once and by the signal, and leaves no scratch files and no programs behind.
//!
//! A killed process (SIGKILL) can do nothing of this; what it leaves is swept by the next `setup` and by `gc`. So nothing
//! relies on this module but a tidy disk.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
#[cfg(unix)]
use std::time::Duration;

use tempfile::TempDir;

/// What to remove and to end. Whoever holds it is not interrupted.
static STATE: Mutex<State> = Mutex::new(State { scratch: Vec::new(), groups: Vec::new() });

/// Set by the signal handler itself: a program that we wait for dies of the same signal, at the same time.
static PENDING: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

#[derive(Debug)]
struct State {
    scratch: Vec<PathBuf>,
    groups: Vec<u32>,
}

fn state() -> MutexGuard<'static, State> {
    // Two lists are whole whatever panicked.
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file or folder that an interrupt removes, as long as this lives.
#[derive(Debug)]
pub struct Guard(PathBuf);

impl Guard {
    /// Guards `path`.
    pub fn new(path: &Path) -> Self {
        state().scratch.push(path.to_owned());
        Guard(path.to_owned())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut state = state();
        if let Some(index) = state.scratch.iter().position(|path| *path == self.0) {
            state.scratch.swap_remove(index);
        }
    }
}

/// A temporary folder that removes itself, also when the process is interrupted.
#[derive(Debug)]
pub struct Folder {
    // Dropped in this order: first removed, then no longer guarded.
    folder: TempDir,
    _guard: Guard,
}

impl Folder {
    /// A new folder in `parent`, whose name begins with `prefix`.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn within(parent: &Path, prefix: &str) -> io::Result<Self> {
        let folder = tempfile::Builder::new().prefix(prefix).tempdir_in(parent)?;
        let guard = Guard::new(folder.path());
        Ok(Folder { folder, _guard: guard })
    }

    /// A new folder in the system's folder for temporary files.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn temporary(prefix: &str) -> io::Result<Self> {
        Self::within(&std::env::temp_dir(), prefix)
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Leaves it where it is, from now on.
    pub fn keep(self) -> PathBuf {
        self.folder.keep()
    }
}

/// A process group that an interrupt ends, as long as this lives: programs in a group of their own get no signal from the
/// terminal.
#[derive(Debug)]
pub struct Group(u32);

impl Group {
    /// Starts a program with `spawn`, which returns it with the number of its group.
    ///
    /// # Errors
    /// What `spawn` reports.
    pub fn start<T>(spawn: impl FnOnce() -> io::Result<(T, u32)>) -> io::Result<(T, Self)> {
        // Not interrupted in between: a program that was started is in the list.
        let mut state = state();
        let (child, group) = spawn()?;
        state.groups.push(group);
        Ok((child, Group(group)))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        state().groups.retain(|group| *group != self.0);
    }
}

/// Runs `step` without being interrupted: the rename that makes a scratch folder an entry must not meet its removal.
pub fn hold_back<T>(step: impl FnOnce() -> T) -> T {
    let _state = state();
    step()
}

/// Whether the process is about to end by a signal: then its failures are no news.
pub fn is_pending() -> bool {
    PENDING.load(Ordering::SeqCst)
}

/// Waits for the end that [`is_pending`] announces.
pub fn wait_for_end() -> ! {
    loop {
        thread::park();
    }
}

/// Watches for SIGINT, SIGTERM and SIGHUP. What the caller of this process ignores (`nohup`, a shell's background job)
/// stays ignored.
#[cfg(unix)]
pub fn install() {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let watched: Vec<i32> =
        [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| !is_ignored(*signal)).collect();
    for signal in &watched {
        let _ = signal_hook::flag::register(*signal, Arc::clone(&PENDING));
    }
    // Without it, the signals do what they always did.
    let Ok(mut signals) = signal_hook::iterator::Signals::new(watched) else { return };
    thread::spawn(move || {
        for signal in signals.forever() {
            tidy();
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    });
}

/// Nothing: such a system has its own ways.
#[cfg(not(unix))]
pub fn install() {}

/// Ends the programs and removes the scratch files, as far as [`PATIENCE`] goes: whoever pressed Ctrl-C does not want to
/// wait for a slow disk, and what stays is swept later.
#[cfg(unix)]
fn tidy() {
    let (sender, done) = std::sync::mpsc::channel();
    thread::spawn(move || {
        // Held until the end: nothing is made or published any more.
        let state = state();
        for group in &state.groups {
            if let Some(group) = i32::try_from(*group).ok().and_then(rustix::process::Pid::from_raw) {
                let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            }
        }
        remove(&state.scratch);
        let _ = sender.send(());
        wait_for_end()
    });
    let _ = done.recv_timeout(PATIENCE);
}

/// The longest time between a signal and the end.
#[cfg(unix)]
const PATIENCE: Duration = Duration::from_secs(2);

/// Removes `paths`. Programs that got the signal, too, may still be writing for a moment.
#[cfg(unix)]
fn remove(paths: &[PathBuf]) {
    for _ in 0..20 {
        let mut left = false;
        for path in paths {
            let _ = match path.is_dir() {
                true => fs_err::remove_dir_all(path),
                false => fs_err::remove_file(path),
            };
            left |= path.exists();
        }
        if !left {
            return;
        }
        thread::sleep(Duration::from_millis(25));
    }
}

/// Whether the process was started with `signal` ignored.
#[cfg(unix)]
fn is_ignored(signal: i32) -> bool {
    let status = fs_err::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask & (1 << (signal - 1)) != 0
}
