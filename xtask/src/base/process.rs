//! Running other programs: with a time limit for probes, and with their output kept apart from ours.

use std::ffi::OsStr;
use std::io::{self, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::base::interrupt::Group;

/// How long a `--version` probe may take. Longer means a wrapper that never exits, or a dead network mount.
pub const PROBE_LIMIT: Duration = Duration::from_secs(10);

/// A finished program's output.
#[derive(Clone, Debug)]
pub struct Output {
    /// How it ended.
    pub status: ExitStatus,
    /// Standard output, invalid UTF-8 replaced.
    pub stdout: String,
    /// Standard error, invalid UTF-8 replaced.
    pub stderr: String,
}

/// Why a program gave no [`Output`].
#[derive(Debug)]
pub enum Failure {
    /// It could not be started.
    Start(io::Error),
    /// It was still running after the limit and was killed.
    TimedOut(Duration),
}

/// Runs `command` with no standard input and collects its output, killing its process group after `limit`.
///
/// The limit also covers a program that ends while something it started keeps its output open.
pub fn output(command: &mut Command, limit: Duration) -> Result<Output, Failure> {
    let deadline = Instant::now() + limit;
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(command, 0);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let started = Group::start(|| {
        let child = command.spawn()?;
        let group = child.id();
        Ok((child, group))
    });
    let (mut child, _group) = started.map_err(Failure::Start)?;
    let stdout = drain(child.stdout.take());
    let stderr = drain(child.stderr.take());
    let finished = wait(&mut child, deadline).map_err(Failure::Start)?.and_then(|status| {
        let remaining = || deadline.saturating_duration_since(Instant::now());
        let stdout = stdout.recv_timeout(remaining()).ok()?;
        let stderr = stderr.recv_timeout(remaining()).ok()?;
        Some(Output { status, stdout: text(&stdout), stderr: text(&stderr) })
    });
    finished.ok_or_else(|| {
        kill_group(&mut child);
        Failure::TimedOut(limit)
    })
}

/// Says whether `program` on its own names a path rather than something to look up on PATH.
pub fn is_path(program: &OsStr) -> bool {
    std::path::Path::new(program).components().count() > 1
}

fn wait(child: &mut Child, deadline: Instant) -> io::Result<Option<ExitStatus>> {
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        thread::sleep(pause);
        // Short, since `doctor` waits for several probes of some 15 ms each and must feel instant.
        pause = (pause * 2).min(Duration::from_millis(2));
    }
}

fn drain(pipe: Option<impl Read + Send + 'static>) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // A read error means the writer is gone: what came so far is the output.
            let _ = pipe.read_to_end(&mut bytes);
        }
        // Nobody listens any more after a time-out.
        let _ = sender.send(bytes);
    });
    receiver
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn kill_group(child: &mut Child) {
    // The group holds what a wrapper script started; killing the child alone would leave it running. Both fail
    // only when the process is already gone.
    #[cfg(unix)]
    if let Some(group) = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
    let _ = child.kill();
    let _ = child.wait();
}
