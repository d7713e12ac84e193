//! Waiting for kernel file locks: who holds one is said once, and the wait ends at a limit where the user gave one.
//!
//! The kernel releases a lock when its holder ends, however it ends; what a lock file says is for people alone.

use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::report::error::{Error, Result};

crate::codes! {
    LOCK_TIMEOUT = "KILN-0905", Machine, "another process holds a lock for too long",
        "A command that changes the store or the checkout waits while another one works on the same thing, as long as it \
         takes; with `--lock-timeout SECONDS` no longer than that. The message names the process. A lock is never left over: \
         the kernel releases it when its holder ends, so let that process end, or end it, and run the command again.";
}

/// How a lock is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// By one process at a time.
    Alone,
    /// In common with all who take it so.
    Shared,
}

impl Mode {
    fn attempt(self, file: &File) -> Result<bool, io::Error> {
        let taken = match self {
            Mode::Alone => file.try_lock(),
            Mode::Shared => file.try_lock_shared(),
        };
        match taken {
            Ok(()) => Ok(true),
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    fn wait(self, file: &File) -> Result<(), io::Error> {
        match self {
            Mode::Alone => file.lock(),
            Mode::Shared => file.lock_shared(),
        }
    }
}

/// Why a lock was not taken.
#[derive(Debug)]
pub enum Failure {
    /// The file system has no locks, or fails.
    System(io::Error),
    /// [`LOCK_TIMEOUT`].
    TimedOut(Error),
}

/// Locks `file`, which is at `path`. Where another process holds it, `waiting` is told once, with `why` at the end of the
/// sentence, and the wait ends after `limit`.
///
/// # Errors
/// See [`Failure`].
pub fn take(
    file: &File,
    path: &Path,
    mode: Mode,
    why: &str,
    limit: Option<Duration>,
    waiting: &dyn Fn(&str),
) -> Result<(), Failure> {
    if mode.attempt(file).map_err(Failure::System)? {
        return Ok(());
    }
    // A limit beyond the end of the clock is none.
    let limit = limit.and_then(|limit| Some((limit, Instant::now().checked_add(limit)?)));
    let Some((limit, deadline)) = limit else {
        waiting(&format!("waiting for {}, {why}", holder(file, path)));
        return mode.wait(file).map_err(Failure::System);
    };
    if !limit.is_zero() {
        waiting(&format!("waiting at most {} s for {}, {why}", limit.as_secs(), holder(file, path)));
    }
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Failure::TimedOut(timed_out(file, path, why, limit)));
        }
        std::thread::sleep(left.min(PAUSE));
        if mode.attempt(file).map_err(Failure::System)? {
            return Ok(());
        }
    }
}

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

fn timed_out(file: &File, path: &Path, why: &str, limit: Duration) -> Error {
    let holder = holder(file, path);
    let after = match limit.as_secs() {
        0 => "and --lock-timeout 0 forbids to wait".to_owned(),
        seconds => format!("still after {seconds} s"),
    };
    Error::new(&LOCK_TIMEOUT, format!("{} is held by {holder}, {why}, {after}", path.display()))
        .hint("let that process end and run it again, or give a longer --lock-timeout SECONDS, or none")
}

/// Who holds the lock: the processes that the kernel names, and since when, where the last of them wrote that into the
/// file.
fn holder(file: &File, path: &Path) -> String {
    let noted = fs_err::read_to_string(path).unwrap_or_default();
    let noted = noted.trim();
    let processes = holders(file);
    match processes.as_slice() {
        [] if noted.is_empty() => "another process".to_owned(),
        [] => noted.to_owned(),
        [one] if noted.starts_with(&format!("process {one} ")) => noted.to_owned(),
        [one] => format!("process {one}"),
        [others @ .., last] => {
            let others: Vec<String> = others.iter().map(u32::to_string).collect();
            format!("processes {} and {last}", others.join(", "))
        }
    }
}

/// The processes that hold a lock on `file`, as far as the kernel tells.
#[cfg(target_os = "linux")]
fn holders(file: &File) -> Vec<u32> {
    use std::os::unix::fs::MetadataExt as _;
    let Ok(inode) = file.metadata().map(|metadata| metadata.ino()) else { return Vec::new() };
    parse_locks(&fs_err::read_to_string("/proc/locks").unwrap_or_default(), inode)
}

#[cfg(not(target_os = "linux"))]
fn holders(_: &File) -> Vec<u32> {
    Vec::new()
}

/// The holders in the text of /proc/locks. Lines of those who wait have an arrow. The device is not compared: on some
/// file systems it is another number than the one of the file.
#[cfg(target_os = "linux")]
fn parse_locks(text: &str, inode: u64) -> Vec<u32> {
    let inode = inode.to_string();
    let mut processes: Vec<u32> = text
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [_, "FLOCK", _, _, process, place, ..] = fields.as_slice() else { return None };
            let same = place.rsplit(':').next() == Some(inode.as_str());
            process.parse().ok().filter(|process| same && *process > 0)
        })
        .collect();
    processes.sort_unstable();
    processes.dedup();
    processes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn locked() -> (tempfile::TempDir, std::path::PathBuf, File) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.lock");
        let file = File::create(&path).unwrap();
        file.lock().unwrap();
        (folder, path, file)
    }

    #[test]
    fn a_limit_ends_the_wait_and_names_the_holder() {
        let (_folder, path, _holder) = locked();
        let pid = std::process::id();
        for (seconds, expected) in [(0, "and --lock-timeout 0 forbids to wait"), (1, "still after 1 s")] {
            let other = File::open(&path).unwrap();
            let told = std::cell::RefCell::new(String::new());
            let limit = Some(Duration::from_secs(seconds));
            let started = Instant::now();
            let why = "which works on the same entry";
            let result =
                take(&other, &path, Mode::Shared, why, limit, &|text| told.replace(text.to_owned()).clear());
            assert!(started.elapsed() >= Duration::from_secs(seconds));
            let Err(Failure::TimedOut(error)) = result else { panic!("{result:?}") };
            assert_eq!(error.code().id, "KILN-0905");
            let by = if cfg!(target_os = "linux") {
                format!("process {pid}")
            } else {
                "another process".to_owned()
            };
            assert_eq!(error.message(), format!("{} is held by {by}, {why}, {expected}", path.display()));
            assert_eq!(told.borrow().is_empty(), seconds == 0, "{}", told.borrow());
        }
    }

    #[test]
    fn a_lock_that_is_released_within_the_limit_is_taken() {
        let (_folder, path, holder) = locked();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let other = File::open(&path).unwrap();
                take(&other, &path, Mode::Alone, "", Some(Duration::from_secs(60)), &|_| {}).unwrap();
            });
            std::thread::sleep(Duration::from_millis(100));
            holder.unlock().unwrap();
        });
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_kernel_names_all_who_share_a_lock_and_none_who_wait() {
        let text = "1: FLOCK  ADVISORY  READ 12 08:01:77 0 EOF\n2: FLOCK  ADVISORY  READ 34 08:01:77 0 EOF\n\
                    2: -> FLOCK  ADVISORY  WRITE 56 08:01:77 0 EOF\n3: POSIX  ADVISORY  WRITE 78 08:01:77 0 EOF\n\
                    4: FLOCK  ADVISORY  WRITE 90 08:01:770 0 EOF\n";
        assert_eq!(parse_locks(text, 77), [12, 34]);
    }
}
