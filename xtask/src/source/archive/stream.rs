//! The bytes of an archive: decompressed, counted, and refused when damaged.

use std::io::{self, BufRead, Read};

use flate2::bufread::GzDecoder;

use super::{DAMAGED, LFS_START, too_big};
use crate::report::error::{Error, Result};

/// What a file that is not gzip seems to be.
pub(super) fn other_format(start: &[u8]) -> Option<&'static str> {
    let text = start.trim_ascii_start();
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text).trim_ascii_start();
    let begins = |with: &[u8]| text.get(..with.len()).is_some_and(|part| part.eq_ignore_ascii_case(with));
    match start {
        [] => Some("empty"),
        [0x1f, 0x8b, ..] => None,
        [b'P', b'K', 3 | 5, ..] => Some("a zip file"),
        [0xfd, b'7', b'z', b'X', b'Z', ..] => Some("an xz file"),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some("a zstd file"),
        [b'B', b'Z', b'h', ..] => Some("a bzip2 file"),
        _ if start.get(257..262) == Some(b"ustar") => Some("a plain .tar that was never compressed"),
        _ if begins(b"<!doctype html") || begins(b"<html") || begins(b"<?xml") => Some("an HTML page"),
        _ if begins(LFS_START) => Some("a Git LFS pointer, not the content"),
        _ => Some("not a gzip file"),
    }
}

/// All members of a gzip file; unlike flate2's own reader it tells what follows the last one from a cut.
pub(super) struct GzipMembers<R>(pub(super) Option<GzDecoder<R>>);

impl<R: BufRead> Read for GzipMembers<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(decoder) = &mut self.0 {
            let read = decoder.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            let follows = decoder.get_mut().fill_buf()?;
            let another = match follows.first() {
                None => false,
                Some(0x1f) => true,
                Some(_) => return Err(io::Error::new(io::ErrorKind::InvalidData, "trailing bytes")),
            };
            self.0 = self.0.take().filter(|_| another).map(|decoder| GzDecoder::new(decoder.into_inner()));
        }
        Ok(0)
    }
}

/// The uncompressed stream: counts, and turns failures into errors that say which kind of damage it is.
pub(super) struct Metered<R> {
    pub(super) stream: R,
    pub(super) left: u64,
    pub(super) failure: Option<Error>,
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = match self.stream.read(buffer) {
            Ok(read) => read as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Err(error),
            Err(error) => {
                self.failure = Some(damage(&error));
                return Err(io::ErrorKind::Other.into());
            }
        };
        match self.left.checked_sub(read) {
            Some(left) => self.left = left,
            None => {
                self.failure = Some(too_big("the uncompressed archive is larger than its limit".into()));
                return Err(io::ErrorKind::Other.into());
            }
        }
        Ok(read as usize)
    }
}

impl<R: Read> Metered<R> {
    /// Reads what follows the last member: the second of two blocks of zeros, padding, and nothing else.
    pub(super) fn finish(mut self) -> Result<()> {
        let mut tail = [0; 4096];
        let mut zeros = 0;
        loop {
            match self.read(&mut tail) {
                Ok(0) if zeros < 512 => {
                    return Err(damaged(
                        "the archive ends without its end-of-archive blocks, so it was cut off",
                    ));
                }
                Ok(0) => return Ok(()),
                Ok(read) if tail[..read].iter().any(|&byte| byte != 0) => {
                    return Err(damaged("the archive has something behind its end"));
                }
                Ok(read) => zeros += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(self.failure.take().unwrap_or_else(|| damage(&error)));
                }
            }
        }
    }
}

pub(super) fn damage(error: &io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => damaged("the compressed file ends too early, so it was cut off"),
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => {
            damaged("the compressed file is corrupt, or something follows its end").cause(error)
        }
        _ => damaged("the archive cannot be read").cause(error),
    }
}

pub(super) fn damaged(what: &str) -> Error {
    Error::new(&DAMAGED, what).hint("remove the file and run `cargo xtask setup` again")
}
