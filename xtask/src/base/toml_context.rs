//! Shows a place in a TOML file: path, line and column, and the lines around it with a caret.
//!
//! Syntax errors, type errors and errors of our own about a value all look the same.

use std::fmt;
use std::fmt::Write as _;
use std::marker::PhantomData;
use std::ops::Range;
use std::path::Path;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

/// A struct that is written as a table and nothing else: serde alone would also fill it from an array, by position.
#[derive(Clone, Debug, PartialEq)]
pub struct Table<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Table<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OnlyTable<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for OnlyTable<T> {
            type Value = Table<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Table<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Table)
            }
        }
        deserializer.deserialize_map(OnlyTable(PhantomData))
    }
}

/// `message` about `span` (byte offsets into `text`, the content of `file`), with the lines around it.
pub fn excerpt(file: &Path, text: &str, span: Range<usize>, message: &str) -> String {
    let start = floor(text, span.start);
    let end = floor(text, span.end).max(start);
    let line_start = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
    let index = text[..start].matches('\n').count();
    let before = &text[line_start..start];
    let column = before.chars().count() + 1;
    let marked = text[start..end].lines().next().unwrap_or_default().chars().count().max(1);

    let mut shown = format!("{}:{}:{column}: {message}", file.display(), index + 1);
    let last = index + 2;
    let width = last.to_string().len();
    let _ = write!(shown, "\n{:width$} |", "");
    let lines = text.lines().chain(text.is_empty().then_some("")).enumerate();
    let mut reached = false;
    for (number, line) in lines.skip(index.saturating_sub(1)).take_while(|(number, _)| *number < last) {
        let _ = write!(shown, "\n{}", format!("{:>width$} | {line}", number + 1).trim_end());
        if number == index {
            reached = true;
            push_caret(&mut shown, width, before, marked);
        }
    }
    // The end of a file that ends in a newline is on a line of its own, which `lines` does not give.
    if !reached {
        let _ = write!(shown, "\n{:>width$} |", index + 1);
        push_caret(&mut shown, width, before, marked);
    }
    shown
}

fn push_caret(shown: &mut String, width: usize, before: &str, marked: usize) {
    // Tabs stay tabs, so that the caret stands below its character however wide they are.
    let pad: String = before.chars().map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
    let _ = write!(shown, "\n{:width$} | {pad}{}", "", "^".repeat(marked));
}

/// The nearest character boundary at or below `offset`.
fn floor(text: &str, offset: usize) -> usize {
    let offset = offset.min(text.len());
    (0..=offset).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_the_place_and_shows_its_neighbours() {
        let text = "a = 1\nbé = \"x\"\r\nc = 3\nd = 4\n";
        assert_eq!(
            excerpt(Path::new("f.toml"), text, 12..15, "bad"),
            "f.toml:2:6: bad\n  |\n1 | a = 1\n2 | bé = \"x\"\n  |      ^^^\n3 | c = 3"
        );
    }

    #[test]
    fn survives_empty_text_the_end_and_wrong_offsets() {
        assert_eq!(excerpt(Path::new("f"), "", 0..0, "m"), "f:1:1: m\n  |\n1 |\n  | ^");
        assert_eq!(excerpt(Path::new("f"), "a\n", 2..2, "m"), "f:2:1: m\n  |\n1 | a\n2 |\n  | ^");
        assert_eq!(excerpt(Path::new("f"), "é", 1..99, "m"), "f:1:1: m\n  |\n1 | é\n  | ^");
        assert_eq!(excerpt(Path::new("f"), "\tx", 1..2, "m"), "f:1:2: m\n  |\n1 | \tx\n  | \t^");
    }
}
