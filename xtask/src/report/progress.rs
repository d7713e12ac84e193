//! Progress of long work, on standard error: a bar on a terminal, a line now and then elsewhere.

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::Mutex;

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

/// Where work in bytes reports how far it is. Nothing that it does can fail the work.
pub trait Progress: Sync {
    /// Work of `total` bytes begins, or begins again; `None` when nobody knows how many.
    fn start(&self, total: Option<u64>);
    /// Another `bytes` are done.
    fn advance(&self, bytes: u64);
    /// The work is over, whether or not it succeeded.
    fn finish(&self);
    /// Something that the user should know now, such as a pause before the next attempt.
    fn note(&self, message: &str);
    /// Something that the user should know even when nothing else is said.
    fn warn(&self, message: &str) {
        self.note(&format!("warning: {message}"));
    }
    /// Whether the programs that are started should be quiet too.
    fn is_quiet(&self) -> bool {
        false
    }
}

/// The progress of work called `name`, on standard error in the form that suits it; warnings alone when `quiet`.
///
/// No form has colours, so NO_COLOR changes nothing here.
pub fn on_stderr(name: &str, quiet: bool) -> Box<dyn Progress> {
    if quiet {
        Box::new(Quiet { name: name.to_owned() })
    } else if io::stderr().is_terminal() {
        Box::new(Bar { name: name.to_owned(), bar: Mutex::new(None) })
    } else {
        Box::new(Lines::new(name, io::stderr()))
    }
}

/// Reports nothing.
pub struct Silent;

impl Progress for Silent {
    fn start(&self, _total: Option<u64>) {}
    fn advance(&self, _bytes: u64) {}
    fn finish(&self) {}
    fn note(&self, _message: &str) {}
}

/// Warnings alone.
struct Quiet {
    name: String,
}

impl Progress for Quiet {
    fn start(&self, _total: Option<u64>) {}
    fn advance(&self, _bytes: u64) {}
    fn finish(&self) {}
    fn note(&self, _message: &str) {}

    fn warn(&self, message: &str) {
        // Nobody is left to tell when standard error is gone.
        let _ = writeln!(io::stderr(), "{}: warning: {message}", self.name);
    }

    fn is_quiet(&self) -> bool {
        true
    }
}

struct Bar {
    name: String,
    bar: Mutex<Option<ProgressBar>>,
}

impl Bar {
    fn with<T>(&self, action: impl FnOnce(&mut Option<ProgressBar>) -> T) -> T {
        // A poisoned lock still holds a bar that can be drawn.
        action(&mut self.bar.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }
}

impl Progress for Bar {
    fn start(&self, total: Option<u64>) {
        let template = match total {
            Some(_) => "{prefix} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            None => "{prefix} {spinner} {bytes} {bytes_per_sec}",
        };
        let bar = total.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_prefix(self.name.clone());
        self.with(|present| {
            if let Some(previous) = present.replace(bar) {
                previous.finish_and_clear();
            }
        });
    }

    fn advance(&self, bytes: u64) {
        self.with(|bar| bar.iter().for_each(|bar| bar.inc(bytes)));
    }

    fn finish(&self) {
        self.with(|bar| bar.take().iter().for_each(ProgressBar::finish_and_clear));
    }

    fn note(&self, message: &str) {
        let line = format!("{}: {message}", self.name);
        self.with(|bar| match bar {
            Some(bar) => bar.println(line),
            // Nobody is left to tell when standard error is gone.
            None => drop(writeln!(io::stderr(), "{line}")),
        });
    }
}

/// A line at every tenth of the work, or at every [`STEP`] when its size is unknown.
struct Lines<W> {
    name: String,
    state: Mutex<LinesState<W>>,
}

struct LinesState<W> {
    out: W,
    total: Option<u64>,
    done: u64,
    said: u64,
}

impl<W: io::Write> Lines<W> {
    fn new(name: &str, out: W) -> Self {
        let state = LinesState { out, total: None, done: 0, said: 0 };
        Lines { name: name.to_owned(), state: Mutex::new(state) }
    }

    fn with(&self, action: impl FnOnce(&mut LinesState<W>)) {
        action(&mut self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
    }
}

impl<W: io::Write + Send> Progress for Lines<W> {
    fn start(&self, total: Option<u64>) {
        self.with(|state| {
            state.total = total.filter(|&total| total > 0);
            state.done = 0;
            state.said = 0;
        });
    }

    fn advance(&self, bytes: u64) {
        self.with(|state| {
            state.done = state.done.saturating_add(bytes);
            let (step, text) = match state.total {
                Some(total) => {
                    let tenth = state.done.saturating_mul(10) / total;
                    let text =
                        format!("{} of {} ({} %)", HumanBytes(state.done), HumanBytes(total), tenth * 10);
                    (tenth, text)
                }
                None => (state.done / STEP, HumanBytes(state.done).to_string()),
            };
            if step > state.said {
                state.said = step;
                let _ = writeln!(state.out, "{}: {text}", self.name);
            }
        });
    }

    fn finish(&self) {}

    fn note(&self, message: &str) {
        self.with(|state| drop(writeln!(state.out, "{}: {message}", self.name)));
    }
}

/// Bytes between two lines when the total is unknown.
const STEP: u64 = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn said(lines: Lines<Vec<u8>>) -> String {
        String::from_utf8(lines.state.into_inner().unwrap().out).unwrap()
    }

    #[test]
    fn without_a_terminal_there_is_a_line_at_every_tenth() {
        let lines = Lines::new("source", Vec::new());
        lines.start(Some(2048));
        for _ in 0..2048 {
            lines.advance(1);
        }
        lines.note("again in 1 s");
        lines.finish();
        let said = said(lines);
        assert_eq!(said.lines().count(), 11);
        assert!(said.starts_with("source: 205 B of 2.00 KiB (10 %)\n"), "{said}");
        assert!(said.ends_with("source: 2.00 KiB of 2.00 KiB (100 %)\nsource: again in 1 s\n"), "{said}");
    }

    #[test]
    fn an_unknown_or_zero_total_reports_by_size() {
        let lines = Lines::new("source", Vec::new());
        lines.start(Some(0));
        lines.advance(STEP - 1);
        lines.advance(1);
        assert_eq!(said(lines), "source: 4.00 MiB\n");
    }
}
