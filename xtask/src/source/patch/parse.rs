//! Reading a patch file, line by line.

use std::collections::HashSet;

use super::{
    CRLF, EMPTY, FilePatch, Hunk, Line, MALFORMED, PREFIX, TreePath, UNSAFE_PATH, UNSUPPORTED, shown,
};
use crate::report::error::{Code, Error, Result};

/// The changes that the patch file `name` makes, at least one.
pub(super) fn files(name: &str, bytes: &[u8]) -> Result<Vec<FilePatch>> {
    let mut parser = Parser { name, rest: bytes, number: 0, cut: false };
    if bytes.trim_ascii().is_empty() {
        return Err(Error::new(&EMPTY, format!("{name} is empty, expected a diff"))
            .hint("restore the file, or remove its entry from PROVENANCE"));
    }
    let mut files = Vec::new();
    let mut seen = HashSet::new();
    // A mail header and a message may come before the first diff, and after a mail signature.
    let mut prose = true;
    while let Some(line) = parser.peek() {
        let is_plain = line.starts_with(b"--- ") && parser.second().starts_with(b"+++ ");
        if line.starts_with(b"diff --git ") || is_plain {
            let at = parser.number + 1;
            let file = if is_plain { parser.plain_file()? } else { parser.git_file()? };
            let both = file.old.iter().chain(file.new.iter().filter(|_| file.old != file.new));
            for path in both {
                if !seen.insert(path.clone()) {
                    return Err(parser.fault_at(at, &MALFORMED, format!("{path} is in the patch twice")));
                }
            }
            files.push(file);
            prose = false;
        } else if let Some(what) = unsupported(line) {
            parser.next();
            return Err(parser.fault(&UNSUPPORTED, format!("{what}: `{}`", shown(line))));
        } else if line.starts_with(b"@@ -") {
            parser.next();
            return Err(parser.fault(&MALFORMED, "a hunk without the names of its file before it"));
        } else {
            parser.next();
            prose |= line == b"-- " || line == b"--" || line.starts_with(b"From ");
            if !prose && !line.is_empty() {
                let what = format!(
                    "`{}` belongs to nothing; does the hunk above have more lines than its header says?",
                    shown(line)
                );
                return Err(parser.fault(&MALFORMED, what));
            }
        }
    }
    if files.is_empty() {
        return Err(Error::new(&EMPTY, format!("{name} holds no diff, only other text"))
            .hint("restore the file, or remove its entry from PROVENANCE"));
    }
    Ok(files)
}

struct Parser<'a> {
    name: &'a str,
    rest: &'a [u8],
    /// The number of the line that was read last, from 1.
    number: usize,
    /// Whether that line was the last one and had no line feed.
    cut: bool,
}

/// The extended headers of git.
#[derive(Default)]
struct Extended {
    old_mode: Option<bool>,
    new_mode: Option<bool>,
    is_new: bool,
    is_deleted: bool,
    rename_from: Option<TreePath>,
    rename_to: Option<TreePath>,
}

/// What a `---` or `+++` line names.
type Side = Option<TreePath>;

impl<'a> Parser<'a> {
    /// The next line without its line feed.
    fn peek(&self) -> Option<&'a [u8]> {
        if self.rest.is_empty() {
            return None;
        }
        Some(&self.rest[..self.line_length()])
    }

    /// The line after the next, or nothing.
    fn second(&self) -> &'a [u8] {
        let rest = self.rest.get(self.line_length() + 1..).unwrap_or_default();
        &rest[..rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len())]
    }

    fn line_length(&self) -> usize {
        self.rest.iter().position(|&byte| byte == b'\n').unwrap_or(self.rest.len())
    }

    fn next(&mut self) -> Option<&'a [u8]> {
        let line = self.peek()?;
        self.cut = line.len() == self.rest.len();
        self.rest = self.rest.get(line.len() + 1..).unwrap_or_default();
        self.number += 1;
        Some(line)
    }

    /// As [`Parser::next`], for the lines that are the patch's own and not a file's.
    fn next_header(&mut self) -> Result<&'a [u8]> {
        let line = self.next().ok_or_else(|| self.fault(&MALFORMED, "the patch ends within a header"))?;
        if line.ends_with(b"\r") {
            return Err(self.fault(&CRLF, format!("`{}` ends in a carriage return", shown(line))));
        }
        Ok(line)
    }

    fn git_file(&mut self) -> Result<FilePatch> {
        let line = self.next_header()?;
        let at = self.number;
        let names = line.get(b"diff --git ".len()..).unwrap_or_default();
        if !names.starts_with(b"a/") && !names.starts_with(b"\"a/") {
            return Err(self.prefix(line));
        }
        let extended = self.extended()?;
        let has_hunks = self.peek().is_some_and(|line| line.starts_with(b"--- "));
        let sides =
            if has_hunks { Some((self.side(b"--- ", b"a/")?, self.side(b"+++ ", b"b/")?)) } else { None };
        let (old, new) = self.paths(at, names, &extended, sides)?;
        let file = FilePatch {
            hunks: if has_hunks { self.hunks()? } else { Vec::new() },
            old,
            new,
            old_executable: extended.old_mode,
            new_executable: extended.new_mode,
        };
        self.check(at, &file)?;
        Ok(file)
    }

    /// A file of a diff that git did not make.
    fn plain_file(&mut self) -> Result<FilePatch> {
        let at = self.number + 1;
        let (old, new) = (self.side(b"--- ", b"a/")?, self.side(b"+++ ", b"b/")?);
        if let (Some(old), Some(new)) = (&old, &new)
            && old != new
        {
            return Err(self.fault_at(at, &MALFORMED, format!("names two files, {old} and {new}")));
        }
        let hunks = self.hunks()?;
        let file = FilePatch { old, new, old_executable: None, new_executable: None, hunks };
        self.check(at, &file)?;
        Ok(file)
    }

    fn extended(&mut self) -> Result<Extended> {
        let mut found = Extended::default();
        while let Some(line) = self.peek() {
            let Some((key, value)) = EXTENDED.iter().find_map(|&key| Some((key, line.strip_prefix(key)?)))
            else {
                break;
            };
            self.next_header()?;
            match key {
                b"old mode " => found.old_mode = Some(self.mode(value)?),
                b"new mode " => found.new_mode = Some(self.mode(value)?),
                b"new file mode " => {
                    found.is_new = true;
                    found.new_mode = Some(self.mode(value)?);
                }
                b"deleted file mode " => {
                    found.is_deleted = true;
                    found.old_mode = Some(self.mode(value)?);
                }
                b"rename from " => found.rename_from = Some(self.renamed(value)?),
                b"rename to " => found.rename_to = Some(self.renamed(value)?),
                b"copy from " | b"copy to " => {
                    return Err(self.fault(&UNSUPPORTED, format!("a copied file: `{}`", shown(line))));
                }
                b"index " => {
                    // The mode stands here when it does not change; the hashes are abbreviated as git likes.
                    if let Some(space) = value.iter().position(|&byte| byte == b' ') {
                        let mode = self.mode(&value[space + 1..])?;
                        found.old_mode = Some(mode);
                        found.new_mode = Some(mode);
                    }
                }
                _ => {}
            }
        }
        if let Some(line) = self.peek()
            && let Some(what) = unsupported(line)
        {
            self.next();
            return Err(self.fault(&UNSUPPORTED, format!("{what}: `{}`", shown(line))));
        }
        Ok(found)
    }

    fn mode(&self, mode: &[u8]) -> Result<bool> {
        match mode {
            b"100644" => Ok(false),
            b"100755" => Ok(true),
            b"120000" => Err(self.fault(&UNSUPPORTED, "a symlink (mode 120000)")),
            b"160000" => Err(self.fault(&UNSUPPORTED, "a submodule (mode 160000)")),
            _ => Err(self.fault(&MALFORMED, format!("mode `{}`, expected 100644 or 100755", shown(mode)))),
        }
    }

    fn renamed(&self, value: &[u8]) -> Result<TreePath> {
        let name = if value.starts_with(b"\"") {
            match unquote(value) {
                Some((name, [])) => name,
                _ => return Err(self.fault(&MALFORMED, format!("`{}` is badly quoted", shown(value)))),
            }
        } else {
            value.to_vec()
        };
        self.tree_path(&name)
    }

    /// The name on a `---` or `+++` line; `None` is `/dev/null`.
    fn side(&mut self, marker: &[u8], prefix: &[u8]) -> Result<Side> {
        let line = self.next_header()?;
        let Some(value) = line.strip_prefix(marker) else {
            let what = format!("`{}`, expected a line that starts with `{}`", shown(line), shown(marker));
            return Err(self.fault(&MALFORMED, what));
        };
        let name = if value.starts_with(b"\"") {
            match unquote(value) {
                Some((name, rest)) if rest.is_empty() || rest.starts_with(b"\t") => name,
                _ => return Err(self.fault(&MALFORMED, format!("`{}` is badly quoted", shown(value)))),
            }
        } else {
            // A tab ends the name; diff writes a time behind it, git nothing.
            value.split(|&byte| byte == b'\t').next().unwrap_or_default().to_vec()
        };
        if name == b"/dev/null" {
            return Ok(None);
        }
        if name.starts_with(b"/") {
            return Err(self.fault(&UNSAFE_PATH, format!("`{}` is absolute", shown(&name))));
        }
        let Some(name) = name.strip_prefix(prefix) else { return Err(self.prefix(line)) };
        self.tree_path(name).map(Some)
    }

    fn tree_path(&self, name: &[u8]) -> Result<TreePath> {
        TreePath::new(name)
            .map_err(|why| self.fault(&UNSAFE_PATH, format!("the path `{}` {why}", shown(name))))
    }

    /// Brings together what the headers of one file say about its names.
    fn paths(
        &self,
        at: usize,
        names: &[u8],
        extended: &Extended,
        sides: Option<(Side, Side)>,
    ) -> Result<(Side, Side)> {
        let fault = |what: String| self.fault_at(at, &MALFORMED, what);
        let (old, new) = match (&extended.rename_from, &extended.rename_to) {
            (Some(from), Some(to)) if extended.is_new || extended.is_deleted => {
                return Err(fault(format!("{from} is renamed to {to} and also new or deleted")));
            }
            (Some(from), Some(to)) => (Some(from.clone()), Some(to.clone())),
            (None, None) => match &sides {
                Some((old, new)) => (old.clone(), new.clone()),
                None => {
                    let Some(path) = same_name(names) else {
                        return Err(fault("names two files and no rename".into()));
                    };
                    let path = self.tree_path(&path)?;
                    (
                        Some(path.clone()).filter(|_| !extended.is_new),
                        Some(path).filter(|_| !extended.is_deleted),
                    )
                }
            },
            _ => return Err(fault("a rename lacks its `rename from` or `rename to` line".into())),
        };
        if sides.is_some_and(|sides| sides != (old.clone(), new.clone())) {
            return Err(fault("its `---` and `+++` lines do not name the files that are renamed".into()));
        }
        if extended.is_new != old.is_none() || extended.is_deleted != new.is_none() {
            return Err(fault("only one of `/dev/null` and `new file mode` or `deleted file mode`".into()));
        }
        let (Some(first), Some(second)) = (old.as_ref().or(new.as_ref()), new.as_ref().or(old.as_ref()))
        else {
            return Err(fault("both sides are `/dev/null`".into()));
        };
        if old.is_some() && new.is_some() && first != second && extended.rename_from.is_none() {
            return Err(fault(format!("names two files, {first} and {second}, and no rename")));
        }
        if !is_git_line(names, &first.0, &second.0) {
            let what = format!("`diff --git {}` names other files than the lines below it", shown(names));
            return Err(fault(what));
        }
        Ok((old, new))
    }

    fn hunks(&mut self) -> Result<Vec<Hunk>> {
        let mut hunks = Vec::new();
        // Lines that the hunks so far end at, on both sides.
        let (mut old_end, mut new_end) = (0, 0);
        while self.peek().is_some_and(|line| line.starts_with(b"@@ ")) {
            let line = self.next_header()?;
            let Some((old, new)) = ranges(line) else {
                return Err(self.fault(&MALFORMED, format!("`{}` is no hunk header", shown(line))));
            };
            let (old_at, new_at) = (old.at, new.at);
            if old_at < old_end || new_at.checked_sub(new_end) != old_at.checked_sub(old_end) {
                let what = format!(
                    "`{}` does not fit the hunks before it; was the patch edited by hand?",
                    shown(line)
                );
                return Err(self.fault(&MALFORMED, what));
            }
            let header = shown(line);
            let lines = self.hunk_lines(old.count, new.count, &header)?;
            (old_end, new_end) = (old_at + old.count, new_at + new.count);
            hunks.push(Hunk { header, old_at, new_at, lines });
        }
        if hunks.is_empty() {
            self.next();
            return Err(self.fault(&MALFORMED, "expected a hunk that starts with `@@ -`"));
        }
        Ok(hunks)
    }

    fn hunk_lines(&mut self, mut old: usize, mut new: usize, header: &str) -> Result<Vec<Line>> {
        let at = self.number;
        let mut lines: Vec<Line> = Vec::new();
        while old > 0 || new > 0 || self.peek().is_some_and(|line| line.starts_with(b"\\")) {
            let Some(line) = self.next() else {
                let what =
                    format!("the patch ends within `{header}`: {old} old and {new} new lines are missing");
                return Err(self.fault_at(at, &MALFORMED, what));
            };
            if self.cut && !line.starts_with(b"\\") {
                return Err(self.fault(&MALFORMED, "the patch file ends without a line feed, within a hunk"));
            }
            let (in_old, in_new) = match line.first() {
                Some(b' ') => (true, true),
                Some(b'-') => (true, false),
                Some(b'+') => (false, true),
                Some(b'\\') => {
                    self.no_newline(line, &mut lines)?;
                    continue;
                }
                // GNU diff and git write an empty line of context so with suppressBlankEmpty.
                None => (true, true),
                Some(_) => {
                    let what =
                        format!("`{}` within a hunk that lacks {old} old and {new} new lines", shown(line));
                    return Err(self.fault(&MALFORMED, what));
                }
            };
            if (in_old && old == 0) || (in_new && new == 0) {
                let what = format!("`{}` is one line more than `{header}` says", shown(line));
                return Err(self.fault(&MALFORMED, what));
            }
            old -= usize::from(in_old);
            new -= usize::from(in_new);
            let text = [line.get(1..).unwrap_or_default(), b"\n"].concat();
            lines.push(match (in_old, in_new) {
                (true, true) => Line::Both(text),
                (true, false) => Line::Old(text),
                _ => Line::New(text),
            });
        }
        if lines.iter().all(|line| matches!(line, Line::Both(_))) {
            return Err(self.fault_at(at, &MALFORMED, format!("`{header}` changes nothing")));
        }
        Ok(lines)
    }

    /// `\ No newline at end of file`: about the line before it.
    fn no_newline(&self, line: &[u8], lines: &mut [Line]) -> Result<()> {
        if line.ends_with(b"\r") {
            return Err(self.fault(&CRLF, format!("`{}` ends in a carriage return", shown(line))));
        }
        let text = lines.last_mut().map(|last| match last {
            Line::Both(text) | Line::Old(text) | Line::New(text) => text,
        });
        match text {
            Some(text) if text.last() == Some(&b'\n') => {
                text.pop();
                Ok(())
            }
            _ => Err(self.fault(&MALFORMED, format!("`{}` without a line that it is about", shown(line)))),
        }
    }

    /// What must hold for a file as a whole.
    fn check(&self, at: usize, file: &FilePatch) -> Result<()> {
        let fault = |what: String| self.fault_at(at, &MALFORMED, what);
        let changes_mode = file.new_executable.is_some() && file.old_executable != file.new_executable;
        if file.old == file.new && file.hunks.is_empty() && !changes_mode {
            return Err(fault("changes nothing".into()));
        }
        let one_sided = |empty: bool| file.hunks.len() <= 1 && empty;
        if file.old.is_none() && !one_sided(file.hunks.iter().all(|hunk| hunk.old_side().next().is_none())) {
            return Err(fault("a new file with an old side".into()));
        }
        if file.new.is_none() && !one_sided(file.hunks.iter().all(|hunk| hunk.new_side().next().is_none())) {
            return Err(fault("a deleted file with a new side".into()));
        }
        for (number, hunk) in file.hunks.iter().enumerate() {
            if hunk.old_side().next().is_none() && hunk.old_at != 0 {
                let what = format!("`{}` has no line of context to check; make it with `-U3`", hunk.header);
                return Err(fault(what));
            }
            let is_last = number + 1 == file.hunks.len();
            for side in [hunk.old_side().collect::<Vec<_>>(), hunk.new_side().collect()] {
                let may_lack = if is_last { side.len().saturating_sub(1) } else { side.len() };
                if side[..may_lack].iter().any(|line| !line.ends_with(b"\n")) {
                    let what = format!("`{}` has a line without newline before the last", hunk.header);
                    return Err(fault(what));
                }
            }
        }
        Ok(())
    }

    fn prefix(&self, line: &[u8]) -> Error {
        let what = format!("`{}` has no a/ and b/ prefixes", shown(line));
        Error::new(&PREFIX, format!("{}:{}: {what}", self.name, self.number))
            .hint("make the patch again with `git diff --src-prefix=a/ --dst-prefix=b/`")
    }

    fn fault(&self, code: &'static Code, what: impl AsRef<str>) -> Error {
        self.fault_at(self.number, code, what)
    }

    fn fault_at(&self, line: usize, code: &'static Code, what: impl AsRef<str>) -> Error {
        let hint = match code.id {
            id if id == CRLF.id => {
                "put `*.patch -text` into .gitattributes, then remove the patch and check it out again"
            }
            id if id == UNSUPPORTED.id => "carry this change as text, or leave it out of the patch",
            _ => "make the patch again with `git diff` or `git format-patch`",
        };
        Error::new(code, format!("{}:{line}: {}", self.name, what.as_ref())).hint(hint)
    }
}

/// What a line announces that no patch of ours may hold.
fn unsupported(line: &[u8]) -> Option<&'static str> {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    if line == b"GIT binary patch" {
        Some("binary data")
    } else if line.starts_with(b"Binary files ") && line.ends_with(b" differ") {
        Some("a binary change without its data")
    } else if line.starts_with(b"diff --cc ") || line.starts_with(b"diff --combined ") {
        Some("a merge")
    } else {
        None
    }
}

/// One side of a hunk header.
struct Range {
    /// Index of the first line.
    at: usize,
    count: usize,
}

/// `@@ -START[,COUNT] +START[,COUNT] @@`, with anything behind.
fn ranges(line: &[u8]) -> Option<(Range, Range)> {
    let line = line.strip_prefix(b"@@ -")?;
    let end = line.windows(3).position(|part| part == b" @@")?;
    let behind = &line[end + 3..];
    if !behind.is_empty() && !behind.starts_with(b" ") {
        return None;
    }
    let (old, new) = std::str::from_utf8(&line[..end]).ok()?.split_once(" +")?;
    Some((range(old)?, range(new)?))
}

fn range(text: &str) -> Option<Range> {
    let number = |text: &str| -> Option<usize> {
        let is_number = !text.is_empty() && text.len() <= 9 && text.bytes().all(|byte| byte.is_ascii_digit());
        if is_number { text.parse().ok() } else { None }
    };
    let (start, count) = match text.split_once(',') {
        Some((start, count)) => (number(start)?, number(count)?),
        None => (number(text)?, 1),
    };
    // An empty range names the line before it.
    let at = if count == 0 { start } else { start.checked_sub(1)? };
    Some(Range { at, count })
}

/// The name in `a/NAME b/NAME`.
fn same_name(names: &[u8]) -> Option<Vec<u8>> {
    let (first, second) = match quoted_pair(names) {
        Some(pair) => pair,
        None => {
            let middle = names.len() / 2;
            (names.get(..middle)?.to_vec(), names.get(middle..)?.strip_prefix(b" ")?.to_vec())
        }
    };
    let name = first.strip_prefix(b"a/")?;
    (second.strip_prefix(b"b/") == Some(name)).then(|| name.to_vec())
}

/// Whether the names on a `diff --git` line are these two.
fn is_git_line(names: &[u8], old: &[u8], new: &[u8]) -> bool {
    let (first, second) = ([b"a/", old].concat(), [b"b/", new].concat());
    match quoted_pair(names) {
        Some(pair) => pair == (first, second),
        None => names == [&first[..], b" ", &second].concat(),
    }
}

/// The two names of a `diff --git` line on which at least one is quoted.
fn quoted_pair(names: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    if names.starts_with(b"\"") {
        let (first, rest) = unquote(names)?;
        let rest = rest.strip_prefix(b" ")?;
        let second = match rest.first() {
            Some(b'"') => unquote(rest).filter(|(_, rest)| rest.is_empty())?.0,
            _ => rest.to_vec(),
        };
        return Some((first, second));
    }
    let space = names.windows(2).position(|pair| pair == b" \"")?;
    let (second, rest) = unquote(&names[space + 1..])?;
    rest.is_empty().then(|| (names[..space].to_vec(), second))
}

/// Undoes git's quoting of a name; returns what follows the closing quote too.
fn unquote(text: &[u8]) -> Option<(Vec<u8>, &[u8])> {
    let mut rest = text.strip_prefix(b"\"")?;
    let mut name = Vec::new();
    loop {
        let (&byte, after) = rest.split_first()?;
        rest = after;
        match byte {
            b'"' => return Some((name, rest)),
            b'\\' => {
                let (&escape, after) = rest.split_first()?;
                rest = after;
                name.push(match escape {
                    b'a' => 7,
                    b'b' => 8,
                    b't' => b'\t',
                    b'n' => b'\n',
                    b'v' => 11,
                    b'f' => 12,
                    b'r' => b'\r',
                    b'"' | b'\\' => escape,
                    b'0'..=b'3' => {
                        let digit = |byte: u8| matches!(byte, b'0'..=b'7').then(|| byte - b'0');
                        let (second, third) = (digit(*rest.first()?)?, digit(*rest.get(1)?)?);
                        rest = &rest[2..];
                        (escape - b'0') << 6 | second << 3 | third
                    }
                    _ => return None,
                });
            }
            _ => name.push(byte),
        }
    }
}

/// Lines that git writes between `diff --git` and `---`.
const EXTENDED: &[&[u8]] = &[
    b"old mode ",
    b"new mode ",
    b"new file mode ",
    b"deleted file mode ",
    b"rename from ",
    b"rename to ",
    b"copy from ",
    b"copy to ",
    b"similarity index ",
    b"dissimilarity index ",
    b"index ",
];
