fn main() {
    use kiln_engine::backend::{Backend, Wanted, cpu};
    let args: Vec<String> = std::env::args().collect();
    let t = std::time::Instant::now();
    let file = kiln_engine::gguf::Gguf::open(args[1].as_ref()).unwrap();
    let tok = kiln_engine::tokenizer::Tokenizer::from_gguf(&file).unwrap();
    let model = kiln_engine::model::Model::from_gguf(file).unwrap();
    let mut o = cpu::Options::new(1024, args[3].parse().unwrap());
    if let Some(l) = args.get(4) {
        o.level = cpu::Level::from_name(l).unwrap();
    }
    let mut b = cpu::Cpu::load(model, o).unwrap();
    eprintln!("load {:?} {}", t.elapsed(), b.description());
    let mut toks = tok.encode(&args[2], true, true);
    let t = std::time::Instant::now();
    b.run(&toks, 0, Wanted::Last).unwrap();
    eprintln!("prompt {} {:?}", toks.len(), t.elapsed());
    let t = std::time::Instant::now();
    let mut n = 0;
    while toks.len() < 100 {
        let l = b.logits();
        let best = (0..l.len()).max_by(|a, b| l[*a].total_cmp(&l[*b])).unwrap() as u32;
        print!("{}", String::from_utf8_lossy(tok.bytes(best)));
        if tok.is_end(best) {
            break;
        }
        toks.push(best);
        b.run(&[best], toks.len() - 1, Wanted::Last).unwrap();
        n += 1;
    }
    println!();
    eprintln!("{n} {:?} {:.1} t/s", t.elapsed(), n as f64 / t.elapsed().as_secs_f64());
}
