fn main() {
    let path = std::env::args().nth(1).unwrap();
    let s: train::pretrain::PretrainSettings = toml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let t = std::time::Instant::now();
    train::pretrain::pretrain(&s, &burn::tensor::Device::flex(), &mut |p| {
        println!("{:8.1}s {} {}/{} {:.5}", t.elapsed().as_secs_f64(), p.stage, p.step, p.steps, p.loss)
    })
    .unwrap();
}
