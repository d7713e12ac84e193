//! Where two ELF files differ: by section, and by the symbols whose bytes differ.
//!
//! Reading alone. For other formats only the first differing byte is told.

use std::collections::BTreeMap;

use object::read::elf::ElfFile64;
use object::{Object as _, ObjectSection as _, ObjectSymbol as _};

/// Symbols that are named for each section at most.
const MOST_SYMBOLS: usize = 8;

/// Says where `one` and `other` differ, a line each; nothing when they are equal.
pub fn describe(one: &[u8], other: &[u8]) -> Vec<String> {
    if one == other {
        return Vec::new();
    }
    let mut lines = Vec::new();
    if one.len() != other.len() {
        lines.push(format!("size: {} and {} bytes", one.len(), other.len()));
    }
    let parsed = (ElfFile64::<object::Endianness>::parse(one), ElfFile64::<object::Endianness>::parse(other));
    let (Ok(one_file), Ok(other_file)) = parsed else {
        let at = one.iter().zip(other).position(|(a, b)| a != b).unwrap_or(one.len().min(other.len()));
        lines.push(format!("first difference at offset {at:#x} (not both are ELF files)"));
        return lines;
    };
    let (ours, theirs) = (sections(&one_file), sections(&other_file));
    for (name, section) in &ours {
        match theirs.get(name) {
            None => lines.push(format!("section {name}: only in the first")),
            Some(theirs) if section.bytes == theirs.bytes => {}
            Some(theirs) => lines.push(section_line(name, section, theirs, &one_file)),
        }
    }
    for name in theirs.keys().filter(|name| !ours.contains_key(*name)) {
        lines.push(format!("section {name}: only in the second"));
    }
    if lines.is_empty() {
        lines.push("headers only: all sections are equal".to_owned());
    }
    lines
}

struct Section {
    address: u64,
    bytes: Vec<u8>,
}

fn sections(file: &ElfFile64<'_, object::Endianness>) -> BTreeMap<String, Section> {
    let mut found = BTreeMap::new();
    for section in file.sections() {
        let name = section.name().unwrap_or("(unnamed)").to_owned();
        let bytes = section.data().unwrap_or_default().to_vec();
        found.insert(name, Section { address: section.address(), bytes });
    }
    found
}

fn section_line(
    name: &str,
    ours: &Section,
    theirs: &Section,
    file: &ElfFile64<'_, object::Endianness>,
) -> String {
    let differing: Vec<u64> = ours
        .bytes
        .iter()
        .zip(&theirs.bytes)
        .zip(0_u64..)
        .filter_map(|((one, other), at)| (one != other).then_some(at))
        .collect();
    let mut line = format!("section {name}: ");
    if ours.bytes.len() != theirs.bytes.len() {
        line.push_str(&format!("{} and {} bytes, ", ours.bytes.len(), theirs.bytes.len()));
    }
    line.push_str(&format!("{} bytes differ", differing.len()));
    if let Some(first) = differing.first() {
        line.push_str(&format!(", the first at {first:#x}"));
    }
    let mut names = Vec::new();
    if ours.address != 0 {
        for symbol in file.symbols().chain(file.dynamic_symbols()) {
            let start = symbol.address().wrapping_sub(ours.address);
            let next = differing.partition_point(|&at| at < start);
            let inside = differing.get(next).is_some_and(|&at| at - start < symbol.size());
            if symbol.address() >= ours.address && inside {
                names.extend(symbol.name().ok().map(str::to_owned));
            }
        }
    }
    names.sort();
    names.dedup();
    let more = names.len().saturating_sub(MOST_SYMBOLS);
    names.truncate(MOST_SYMBOLS);
    if !names.is_empty() {
        line.push_str(&format!(", in {}", names.join(", ")));
    }
    if more > 0 {
        line.push_str(&format!(" and {more} more symbols"));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_files_have_no_difference_and_other_formats_an_offset() {
        assert_eq!(describe(b"abc", b"abc"), Vec::<String>::new());
        assert_eq!(
            describe(b"abc", b"abdd"),
            ["size: 3 and 4 bytes", "first difference at offset 0x2 (not both are ELF files)"]
        );
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_changed_byte_is_found_by_section_and_symbol() {
        let program = fs_err::read(std::env::current_exe().unwrap()).unwrap();
        let file = ElfFile64::<object::Endianness>::parse(&*program).unwrap();
        let text = file.section_by_name(".text").unwrap();
        let (offset, _) = text.file_range().unwrap();
        let symbol = file
            .symbols()
            .find(|symbol| {
                symbol.size() > 16
                    && symbol.address() >= text.address()
                    && symbol.name().is_ok_and(|name| name.contains("binary_diff"))
            })
            .unwrap();
        let mut changed = program.clone();
        changed[(offset + symbol.address() - text.address()) as usize + 3] ^= 1;
        let lines = describe(&program, &changed);
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].starts_with("section .text: 1 bytes differ, the first at "), "{lines:?}");
        assert!(lines[0].contains(symbol.name().unwrap()), "{lines:?}");
    }
}
