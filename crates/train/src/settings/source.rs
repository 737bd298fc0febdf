//! Where in a recipe a value stands: from a dotted key to `file:line:column`, and back from a byte to the key.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The text of a recipe and its name.
pub(super) struct Source<'a> {
    pub name: &'a str,
    pub text: &'a str,
}

impl Source<'_> {
    /// `file:line:column` of a byte of the text, both counted from 1, columns in characters.
    pub fn place(&self, offset: usize) -> String {
        let before = self.text.get(..offset).unwrap_or(self.text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
        format!("{}:{line}:{column}", self.name)
    }

    /// The place of the value of a dotted key, in which entries of arrays have numbers, or of the closest value around it, or just the file.
    pub fn locate(&self, field: &str) -> String {
        let Ok(document) = DeTable::parse(self.text) else {
            return self.name.to_owned();
        };
        let mut names = field.split('.');
        let mut value = names.next().and_then(|name| entry(document.get_ref(), name));
        let mut place = None;
        while let Some(found) = value {
            place = Some(found.span().start);
            value = names.next().and_then(|name| match found.get_ref() {
                DeValue::Table(inner) => entry(inner, name),
                DeValue::Array(items) => items.get(name.parse::<usize>().ok()?),
                _ => None,
            });
        }
        place.map_or_else(|| self.name.to_owned(), |offset| self.place(offset))
    }

    /// The dotted key whose name or value covers this byte.
    pub fn field_at(&self, span: &Range<usize>) -> Option<String> {
        let document = DeTable::parse(self.text).ok()?;
        field_in(document.get_ref(), span.start)
    }
}

fn entry<'a, 'i>(table: &'a DeTable<'i>, name: &str) -> Option<&'a Spanned<DeValue<'i>>> {
    table.iter().find(|(key, _)| key.get_ref() == name).map(|(_, value)| value)
}

fn field_in(table: &DeTable<'_>, offset: usize) -> Option<String> {
    let mut found = None;
    for (key, value) in table {
        let covers = |span: Range<usize>| span.contains(&offset);
        let inner = match value.get_ref() {
            DeValue::Table(inner) => field_in(inner, offset),
            DeValue::Array(items) => items.iter().find_map(|item| field_in_item(item, offset)),
            _ => None,
        };
        if let Some(inner) = inner {
            return Some(format!("{}.{inner}", key.get_ref()));
        }
        if covers(key.span()) || covers(value.span()) {
            found = Some(key.get_ref().to_string());
        }
    }
    found
}

fn field_in_item(item: &Spanned<DeValue<'_>>, offset: usize) -> Option<String> {
    match item.get_ref() {
        DeValue::Table(inner) => field_in(inner, offset),
        _ => None,
    }
}
