//! Standard output: data alone goes there, and a reader that closed it early is no failure.

use std::io::{self, Write as _};

use crate::report::error::Result;

/// Prints `text` and a line break on standard output. `doctor | head -1` closes it: that is fine.
///
/// # Errors
/// Any failure other than a closed pipe.
pub fn line(text: &str) -> Result<()> {
    match writeln!(io::stdout().lock(), "{text}") {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}

/// Prints `value` as an indented JSON document on standard output.
///
/// # Errors
/// As [`line()`].
pub fn json(value: &impl serde::Serialize) -> Result<()> {
    line(&serde_json::to_string_pretty(value).map_err(io::Error::from)?)
}
