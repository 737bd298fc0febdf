//! The instructions that are obeyed; every other is refused by name.

use super::Pickled;
use super::machine::{Machine, Node, pairs};
use super::numpy::{self, Known};

/// Bytes of a pickle at most.
const LARGEST: usize = 64 << 20;

/// Reads a pickle of any protocol from 1 to 5.
///
/// # Errors
/// What it is refused for: a name that is not one of numpy's values, an instruction that could call something, nonsense.
pub fn read(bytes: &[u8]) -> Result<Pickled, String> {
    if bytes.len() > LARGEST {
        return Err(refused(&format!("it is larger than {} MiB", LARGEST >> 20)));
    }
    Reader { input: bytes, machine: Machine::default() }.run().map_err(|reason| refused(&reason))
}

fn refused(reason: &str) -> String {
    format!("the pickle is refused: {reason}")
}

struct Reader<'a> {
    input: &'a [u8],
    machine: Machine,
}

impl Reader<'_> {
    fn run(mut self) -> Result<Pickled, String> {
        loop {
            let [code] = self.take()?;
            if code == b'.' {
                let result = self.machine.pop()?;
                return self.machine.tree(result);
            }
            self.obey(code)?;
        }
    }

    fn obey(&mut self, code: u8) -> Result<(), String> {
        match code {
            0x80 => self.protocol(),
            // A frame only says how much could be read ahead.
            0x95 => self.take::<8>().map(drop),
            b'(' => self.machine.mark(),
            b'0' => self.machine.pop().map(drop),
            b'1' => self.machine.pop_mark().map(drop),
            b'2' => self.machine.duplicate(),
            b'q' | b'r' | 0x94 | b'p' | b'h' | b'j' | b'g' => self.memo(code),
            b'N' | 0x88 | 0x89 | b'I' | b'L' | b'J' | b'K' | b'M' | 0x8a | 0x8b | b'F' | b'G' => {
                let value = self.number(code)?;
                self.machine.leaf(value)
            }
            b'X' | 0x8c | 0x8d | b'B' | b'C' | 0x8e | 0x96 => self.text(code),
            b']' | b'l' | b'a' | b'e' | b')' | b't' | 0x85 | 0x86 | 0x87 | b'}' | b'd' | b's' | b'u' => self.container(code),
            b'c' | 0x93 => self.global(code),
            b'R' => self.reduce(),
            b'b' => self.build(),
            _ => Err(self.forbidden(code)),
        }
    }

    fn protocol(&mut self) -> Result<(), String> {
        let [version] = self.take()?;
        if version > 5 { Err(format!("its protocol is {version}; 5 is the newest known")) } else { Ok(()) }
    }

    fn memo(&mut self, code: u8) -> Result<(), String> {
        match code {
            b'q' => self.take().and_then(|[index]| self.machine.memoise(Some(index.into()))),
            b'r' => self.take().and_then(|index| self.machine.memoise(Some(u32::from_le_bytes(index)))),
            b'p' => self.parsed("number").and_then(|index| self.machine.memoise(Some(index))),
            b'h' => self.take().and_then(|[index]| self.machine.recall(index.into())),
            b'j' => self.take().and_then(|index| self.machine.recall(u32::from_le_bytes(index))),
            b'g' => self.parsed("number").and_then(|index| self.machine.recall(index)),
            _ => self.machine.memoise(None),
        }
    }

    fn number(&mut self, code: u8) -> Result<Pickled, String> {
        Ok(match code {
            b'N' => Pickled::None,
            0x88 | 0x89 => Pickled::Bool(code == 0x88),
            b'I' => match self.line()?.as_str() {
                "00" => Pickled::Bool(false),
                "01" => Pickled::Bool(true),
                digits => Pickled::Int(digits.parse().map_err(|_| format!("`{digits}` is no integer"))?),
            },
            b'L' => {
                let digits = self.line()?;
                Pickled::Int(digits.trim_end_matches('L').parse().map_err(|_| format!("`{digits}` is no integer of 64 bits"))?)
            }
            b'J' => Pickled::Int(i32::from_le_bytes(self.take()?).into()),
            b'K' => Pickled::Int(u8::from_le_bytes(self.take()?).into()),
            b'M' => Pickled::Int(u16::from_le_bytes(self.take()?).into()),
            0x8a => {
                let [length] = self.take()?;
                long(self.bytes(length.into())?)?
            }
            0x8b => {
                let length = u32::from_le_bytes(self.take()?);
                long(self.bytes(length.into())?)?
            }
            b'F' => Pickled::Float(self.parsed("float")?),
            _ => Pickled::Float(f64::from_be_bytes(self.take()?)),
        })
    }

    fn text(&mut self, code: u8) -> Result<(), String> {
        let length = match code {
            b'X' | b'B' => u32::from_le_bytes(self.take()?).into(),
            0x8c | b'C' => u8::from_le_bytes(self.take()?).into(),
            _ => u64::from_le_bytes(self.take()?),
        };
        let bytes = self.bytes(length)?.to_vec();
        let value = match code {
            b'X' | 0x8c | 0x8d => Pickled::Str(String::from_utf8(bytes).map_err(|_| "a text is not UTF-8".to_owned())?),
            _ => Pickled::Bytes(bytes),
        };
        self.machine.leaf(value)
    }

    fn container(&mut self, code: u8) -> Result<(), String> {
        let machine = &mut self.machine;
        match code {
            b']' => machine.push(Node::List(Vec::new())),
            b'}' => machine.push(Node::Dict(Vec::new())),
            b')' => machine.push(Node::Tuple(Vec::new())),
            0x85..=0x87 => machine.pop_many(usize::from(code - 0x84)).and_then(|items| machine.push(Node::Tuple(items))),
            b't' => machine.pop_mark().and_then(|items| machine.push(Node::Tuple(items))),
            b'l' => machine.pop_mark().and_then(|items| machine.push(Node::List(items))),
            b'd' => machine.pop_mark().and_then(|items| pairs(&items)).and_then(|items| machine.push(Node::Dict(items))),
            b'a' => machine.pop_many(1).and_then(|items| machine.append(items)),
            b'e' => machine.pop_mark().and_then(|items| machine.append(items)),
            b's' => machine.pop_many(2).and_then(|items| machine.set_items(&items)),
            _ => machine.pop_mark().and_then(|items| machine.set_items(&items)),
        }
    }

    /// A name: known, or the end.
    fn global(&mut self, code: u8) -> Result<(), String> {
        let (module, name) = if code == b'c' {
            (self.line()?, self.line()?)
        } else {
            let [module, name] = self.machine.pop_many(2)?[..] else { return Err("it takes from an empty stack".to_owned()) };
            match (self.machine.node(module), self.machine.node(name)) {
                (Node::Leaf(Pickled::Str(module)), Node::Leaf(Pickled::Str(name))) => (module.clone(), name.clone()),
                _ => return Err("it names something by what is no text".to_owned()),
            }
        };
        let known =
            Known::named(&module, &name).ok_or_else(|| format!("it names `{}.{}`, which is not data", shown(&module), shown(&name)))?;
        self.machine.push(Node::Known(known))
    }

    fn reduce(&mut self) -> Result<(), String> {
        let [callable, arguments] = self.machine.pop_many(2)?[..] else { return Err("it takes from an empty stack".to_owned()) };
        let Node::Known(known) = *self.machine.node(callable) else { return Err("it calls what is no name".to_owned()) };
        let node = numpy::construct(&self.machine, known, arguments)?;
        self.push_made(node)
    }

    fn build(&mut self) -> Result<(), String> {
        let state = self.machine.pop()?;
        let target = self.machine.top()?;
        let node = numpy::set_state(&self.machine, target, state)?;
        if let Node::Leaf(Pickled::Array { values, .. }) = &node {
            self.machine.spend(values.len())?;
        }
        self.machine.replace(target, node);
        Ok(())
    }

    fn push_made(&mut self, node: Node) -> Result<(), String> {
        match node {
            Node::Leaf(value) => self.machine.leaf(value),
            node => self.machine.push(node),
        }
    }

    fn forbidden(&mut self, code: u8) -> String {
        match code {
            b'i' => match (self.line(), self.line()) {
                (Ok(module), Ok(name)) => format!("it calls `{}.{}`", shown(&module), shown(&name)),
                _ => "it calls something".to_owned(),
            },
            b'o' | 0x81 | 0x92 => "it makes an object of a class".to_owned(),
            b'P' | b'Q' => "it names an object outside of it".to_owned(),
            0x82..=0x84 => "it uses a registered extension".to_owned(),
            0x97 | 0x98 => "its data is in a buffer outside of it".to_owned(),
            _ => format!("the instruction {code:#04x} is not one of plain data"),
        }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let (taken, rest) = self.input.split_first_chunk::<N>().ok_or("it ends too early")?;
        self.input = rest;
        Ok(*taken)
    }

    fn bytes(&mut self, length: u64) -> Result<&[u8], String> {
        let length = usize::try_from(length).ok().filter(|&length| length <= self.input.len()).ok_or("it ends too early")?;
        let (taken, rest) = self.input.split_at(length);
        self.input = rest;
        Ok(taken)
    }

    fn line(&mut self) -> Result<String, String> {
        let end = self.input.iter().take(1 << 10).position(|&byte| byte == b'\n').ok_or("a line has no end")?;
        let line = String::from_utf8_lossy(&self.input[..end]).into_owned();
        self.input = &self.input[end + 1..];
        Ok(line)
    }

    fn parsed<T: std::str::FromStr>(&mut self, what: &str) -> Result<T, String> {
        let line = self.line()?;
        line.parse().map_err(|_| format!("`{}` is no {what}", shown(&line)))
    }
}

/// An integer in two's complement, little end first.
fn long(bytes: &[u8]) -> Result<Pickled, String> {
    let negative = bytes.last().is_some_and(|&byte| byte >= 0x80);
    let mut whole = [if negative { 0xff } else { 0 }; 8];
    let whole_bytes = whole.get_mut(..bytes.len()).ok_or("an integer has more than 64 bits")?;
    whole_bytes.copy_from_slice(bytes);
    Ok(Pickled::Int(i64::from_le_bytes(whole)))
}

/// A name from outside, fit for a message.
fn shown(name: &str) -> String {
    name.chars().take(100).map(|c| if c.is_control() { '?' } else { c }).collect()
}
