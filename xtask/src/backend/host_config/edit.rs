//! Editing a TOML file so that what others wrote stays.

use toml_edit::{Decor, DocumentMut, Item, TableLike, Value};

use super::{HEADER, MARK};

/// Takes the text that must stay at the top of the file when its first key is put there.
pub(super) fn take_head(document: &mut DocumentMut) -> String {
    if document.is_empty() {
        let text = document.trailing().as_str().unwrap_or_default().to_owned();
        document.set_trailing("");
        return if text.trim().is_empty() { HEADER.to_owned() } else { format!("{text}\n") };
    }
    let first = document.iter_mut().map(|(_, item)| item).next();
    // A key on top keeps its comment. Of a table's, what a blank line sets apart is the file's.
    let Some(Item::Table(first)) = first else { return String::new() };
    let text = text_of(first.decor());
    let (head, own) = match text.rfind("\n\n") {
        Some(at) => text.split_at(at + 2),
        None => ("", text.as_str()),
    };
    let (head, own) = (head.to_owned(), format!("\n{}", own.trim_start_matches('\n')));
    first.decor_mut().set_prefix(own);
    head
}

/// Sets or removes one key; a present key keeps its place and the comments around it.
pub(super) fn set(table: &mut dyn TableLike, key: &str, value: Option<Value>, comment: &str) {
    let Some(mut value) = value else {
        table.remove(key);
        return;
    };
    let mut prefix = comment.to_owned();
    match table.get_mut(key) {
        Some(present) => {
            if let Some(present) = present.as_value() {
                *value.decor_mut() = present.decor().clone();
            }
            *present = Item::Value(value);
            // kiln's own comment is renewed, because it names the host; a removed one stays removed.
            prefix = table.key(key).map(|key| text_of(key.leaf_decor())).unwrap_or_default();
            if let Some(start) = prefix.rfind(MARK) {
                let end = prefix[start..].find('\n').map_or(prefix.len(), |end| start + end + 1);
                prefix.replace_range(start..end, comment);
            }
        }
        None => {
            table.insert(key, Item::Value(value));
        }
    }
    if let Some(mut key) = table.key_mut(key)
        && !prefix.is_empty()
    {
        key.leaf_decor_mut().set_prefix(prefix);
    }
}

pub(super) fn is_marked(table: &dyn TableLike, key: &str) -> bool {
    table.key(key).is_some_and(|key| text_of(key.leaf_decor()).contains(MARK))
}

pub(super) fn text_of(decor: &Decor) -> String {
    decor.prefix().and_then(|prefix| prefix.as_str()).unwrap_or_default().to_owned()
}

pub(super) fn is_same(present: &Value, want: &Value) -> bool {
    match (present, want) {
        (Value::String(present), Value::String(want)) => present.value() == want.value(),
        (Value::Array(present), Value::Array(want)) => {
            present.len() == want.len()
                && present.iter().zip(want).all(|(present, want)| is_same(present, want))
        }
        _ => false,
    }
}

/// The value alone on one line.
pub(super) fn plain(value: &Value) -> String {
    match value {
        Value::Array(array) => {
            let elements: Vec<_> = array.iter().map(plain).collect();
            format!("[{}]", elements.join(", "))
        }
        Value::String(text) => Value::from(text.value().as_str()).to_string(),
        other => other.clone().decorated("", "").to_string(),
    }
}

pub(super) fn plain_item(item: &Item) -> String {
    item.as_value().map_or_else(|| format!("a {}", item.type_name()), plain)
}
