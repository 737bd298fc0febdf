//! The reader's memory: values that refer to each other, a stack, a memo, and what all that may cost.

use std::collections::HashMap;

use super::Pickled;
use super::numpy::{Dtype, Known};

/// Nesting at most; a value that contains itself is nested without end.
const DEEPEST: usize = 64;

/// What may be made: one for a value, and one for every eight bytes of text or array.
const BUDGET: usize = 1 << 21;

/// A value by its place in [`Machine::nodes`].
pub(super) type Id = usize;

/// Makes a container of its parts.
type Build = fn(Vec<Pickled>) -> Pickled;

/// A value that refers to its parts, as in Python: a list that is filled later is filled wherever it is.
#[derive(Debug)]
pub(super) enum Node {
    /// Anything without parts.
    Leaf(Pickled),
    List(Vec<Id>),
    Tuple(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    /// A constructor that is known.
    Known(Known),
    /// A numpy type.
    Dtype(Dtype),
    /// A numpy array before its state.
    EmptyArray,
}

/// The stack machine.
#[derive(Default)]
pub(super) struct Machine {
    nodes: Vec<Node>,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
    spent: usize,
}

impl Machine {
    /// Counts what is about to be made.
    pub fn spend(&mut self, cost: usize) -> Result<(), String> {
        self.spent = self.spent.saturating_add(cost);
        if self.spent > BUDGET { Err("it makes more values than an answer can have".to_owned()) } else { Ok(()) }
    }

    pub fn push(&mut self, node: Node) -> Result<(), String> {
        self.spend(1)?;
        self.nodes.push(node);
        self.push_id(self.nodes.len() - 1)
    }

    pub fn leaf(&mut self, value: Pickled) -> Result<(), String> {
        self.spend(size(&value))?;
        self.push(Node::Leaf(value))
    }

    fn push_id(&mut self, id: Id) -> Result<(), String> {
        self.spend(1)?;
        self.stack.push(id);
        Ok(())
    }

    /// The last `count` of the stack, not beyond a mark.
    pub fn pop_many(&mut self, count: usize) -> Result<Vec<Id>, String> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let at = self.stack.len().checked_sub(count).filter(|&at| at >= floor);
        at.map(|at| self.stack.split_off(at)).ok_or_else(|| "it takes from an empty stack".to_owned())
    }

    pub fn pop(&mut self) -> Result<Id, String> {
        self.top()?;
        self.stack.pop().ok_or_else(|| "it takes from an empty stack".to_owned())
    }

    pub fn top(&self) -> Result<Id, String> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack.get(floor..).and_then(|above| above.last().copied()).ok_or_else(|| "it takes from an empty stack".to_owned())
    }

    pub fn duplicate(&mut self) -> Result<(), String> {
        self.push_id(self.top()?)
    }

    pub fn mark(&mut self) -> Result<(), String> {
        self.spend(1)?;
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// Everything above the last mark, and the mark.
    pub fn pop_mark(&mut self) -> Result<Vec<Id>, String> {
        let mark = self.marks.pop().ok_or("it has no mark")?;
        Ok(self.stack.split_off(mark.min(self.stack.len())))
    }

    /// Keeps the top under a number, or under the next one.
    pub fn memoise(&mut self, index: Option<u32>) -> Result<(), String> {
        self.spend(1)?;
        let next = u32::try_from(self.memo.len()).map_err(|_| "its memo is full".to_owned())?;
        self.memo.insert(index.unwrap_or(next), self.top()?);
        Ok(())
    }

    pub fn recall(&mut self, index: u32) -> Result<(), String> {
        let id = self.memo.get(&index).copied().ok_or_else(|| format!("it recalls `{index}`, which it never kept"))?;
        self.push_id(id)
    }

    pub fn node(&self, id: Id) -> &Node {
        &self.nodes[id]
    }

    pub fn replace(&mut self, id: Id, node: Node) {
        self.nodes[id] = node;
    }

    /// Adds to the list on top.
    pub fn append(&mut self, items: Vec<Id>) -> Result<(), String> {
        let top = self.top()?;
        let Node::List(list) = &mut self.nodes[top] else { return Err("it appends to what is no list".to_owned()) };
        list.extend(items);
        Ok(())
    }

    /// Adds keys and values, by turns, to the dictionary on top.
    pub fn set_items(&mut self, items: &[Id]) -> Result<(), String> {
        let (top, pairs) = (self.top()?, pairs(items)?);
        let Node::Dict(dict) = &mut self.nodes[top] else { return Err("it sets items of what is no dictionary".to_owned()) };
        dict.extend(pairs);
        Ok(())
    }

    /// The value with all its parts. What is shared is copied, within the budget.
    pub fn tree(&mut self, id: Id) -> Result<Pickled, String> {
        self.spent = 0;
        self.tree_at(id, 0)
    }

    fn tree_at(&mut self, id: Id, depth: usize) -> Result<Pickled, String> {
        if depth > DEEPEST {
            return Err(format!("it is nested deeper than {DEEPEST}"));
        }
        self.spend(1)?;
        let (parts, build): (Vec<Id>, Build) = match &self.nodes[id] {
            Node::Leaf(value) => {
                let copy = value.clone();
                return self.spend(size(&copy)).map(|()| copy);
            }
            Node::List(items) => (items.clone(), Pickled::List),
            Node::Tuple(items) => (items.clone(), Pickled::Tuple),
            Node::Dict(items) => (items.iter().flat_map(|&(key, value)| [key, value]).collect(), dict),
            Node::Known(known) => return Err(format!("it uses `{}` as a value", known.name())),
            Node::Dtype(_) | Node::EmptyArray => return Err("it uses half of a numpy value as a value".to_owned()),
        };
        self.spend(parts.len())?;
        Ok(build(parts.into_iter().map(|part| self.tree_at(part, depth + 1)).collect::<Result<_, _>>()?))
    }
}

/// What text and arrays cost beyond being a value.
fn size(value: &Pickled) -> usize {
    match value {
        Pickled::Str(text) => text.len() / 8,
        Pickled::Bytes(bytes) => bytes.len() / 8,
        Pickled::Array { values, .. } => values.len(),
        _ => 0,
    }
}

/// Keys and values by turns as pairs.
///
/// # Errors
/// A key without a value.
pub(super) fn pairs(items: &[Id]) -> Result<Vec<(Id, Id)>, String> {
    let (pairs, rest) = items.as_chunks::<2>();
    if rest.is_empty() { Ok(pairs.iter().map(|&[key, value]| (key, value)).collect()) } else { Err("a key has no value".to_owned()) }
}

/// A dictionary of keys and values by turns. As in Python, a text that comes again as a key has its first place and its last value.
fn dict(parts: Vec<Pickled>) -> Pickled {
    let mut places: HashMap<String, usize> = HashMap::new();
    let (mut parts, mut items) = (parts.into_iter(), Vec::new());
    while let (Some(key), Some(value)) = (parts.next(), parts.next()) {
        let place = match &key {
            Pickled::Str(text) => *places.entry(text.clone()).or_insert(items.len()),
            _ => items.len(),
        };
        match items.get_mut(place) {
            Some(item) => *item = (key, value),
            None => items.push((key, value)),
        }
    }
    Pickled::Dict(items)
}
